#!/usr/bin/env bash
# Writes random secrets for docker-compose.yml: the API key and the workers' token into .env, and the key
# once more into deploy/secrets/api-key, from which Prometheus reads it. What is in .env already is kept.
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"
umask 077

random() { od -vN 24 -An -tx1 /dev/urandom | tr -d ' \n'; }

touch .env
chmod 600 .env
for name in KVRECALL_API_KEY KVRECALL_WORKER_TOKEN; do
  grep -q "^$name=" .env || echo "$name=$(random)" >>.env
done
mkdir -p deploy/secrets
key=$(grep '^KVRECALL_API_KEY=' .env)
rm -f deploy/secrets/api-key # of the last time: nobody may write to it
printf %s "${key#KVRECALL_API_KEY=}" >deploy/secrets/api-key
# Prometheus runs as another user; the folder keeps the users of this machine out.
chmod 444 deploy/secrets/api-key
echo "secrets are in .env and deploy/secrets/"
