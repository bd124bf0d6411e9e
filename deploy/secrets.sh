#!/usr/bin/env bash
# Writes random secrets for docker-compose.yml: the API key and the workers' token into .env, and the key
# once more into deploy/secrets/api-key, from which Prometheus reads it. What is in .env already is kept.
# Also writes Alertmanager's configuration: with KVRECALL_ALERTS_WEBHOOK in .env alerts are sent there.
set -euo pipefail
alertmanager=$(cd "$(dirname "$0")/.." && pwd)/observability/prometheus/alertmanager.yml
cd "${1:-$(dirname "$0")/..}"
umask 077

random() { od -vN 24 -An -tx1 /dev/urandom | tr -d ' \n'; }

touch .env
chmod 600 .env
for name in KVRECALL_API_KEY KVRECALL_WORKER_TOKEN; do
  grep -q "^$name=" .env || echo "$name=$(random)" >>.env
done
read_variable() { sed -n "s/^$1=[\"']\{0,1\}\([^\"']*\).*/\1/p" .env | tail -n 1; }

mkdir -p deploy/secrets
rm -f deploy/secrets/api-key deploy/secrets/alertmanager.yml # of the last time: nobody may write to them
printf %s "$(read_variable KVRECALL_API_KEY)" >deploy/secrets/api-key
WEBHOOK=$(read_variable KVRECALL_ALERTS_WEBHOOK) awk '
  { print }
  /^  - name: operators$/ && ENVIRON["WEBHOOK"] { print "    webhook_configs: [{url: \"" ENVIRON["WEBHOOK"] "\"}]" }
' "$alertmanager" >deploy/secrets/alertmanager.yml
# Prometheus and Alertmanager run as other users; the folder keeps the users of this machine out.
chmod 444 deploy/secrets/api-key deploy/secrets/alertmanager.yml
echo "secrets are in .env and deploy/secrets/"
