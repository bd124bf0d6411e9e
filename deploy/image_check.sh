#!/usr/bin/env bash
# Builds the gateway's image without Docker, on a base that debootstrap makes, and runs it beside a worker
# of this machine. As root, with Debian's packages buildah and debootstrap:
#   make image-check
# BUILD_OPTIONS: more options of `buildah bud`, such as a mount of pip's configuration.
# BASE: folder that keeps the base between runs.
set -euo pipefail
cd "$(dirname "$0")/.."

KVRECALL=${KVRECALL:-.venv/bin/kvrecall}
BASE=${BASE:-$HOME/.cache/kvrecall-base}
BASE_IMAGE=localhost/python:bookworm
IMAGE=localhost/kvrecall-gateway
CERTIFICATES=/etc/ssl/certs:/etc/ssl/certs:ro
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot

for tool in buildah debootstrap; do
  command -v "$tool" >/dev/null || { echo "image_check: install $tool first" >&2; exit 1; }
done

build_base() {
  if [ ! -f "$BASE/rootfs.done" ]; then
    rm -rf "$BASE/rootfs"
    mkdir -p "$BASE"
    debootstrap --variant=minbase \
      --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$BASE/rootfs" >"$BASE/log"
    touch "$BASE/rootfs.done"
  fi
  local scratch
  scratch=$(buildah from scratch)
  buildah add --quiet "$scratch" "$BASE/rootfs" / >/dev/null
  buildah commit --quiet "$scratch" "$BASE_IMAGE" >/dev/null
  buildah rm "$scratch" >/dev/null
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Wait until a URL answers with 2xx, at most three minutes.
await() {
  python3 - "$1" <<'PYTHON'
import sys, time, urllib.request
end = time.monotonic() + 180
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=5)
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"{sys.argv[1]} does not answer: {error}")
        time.sleep(0.5)
PYTHON
}

expect() {
  if [ "$2" != "$3" ]; then
    echo "image_check: $1: expected '$3', found '$2'" >&2
    exit 1
  fi
  echo "ok: $1"
}

buildah inspect --type image "$BASE_IMAGE" >/dev/null 2>&1 || build_base
# shellcheck disable=SC2086  # several options
buildah bud --format docker --build-arg "PYTHON_IMAGE=$BASE_IMAGE" -v "$CERTIFICATES" \
  ${BUILD_OPTIONS:-} --target gateway -t "$IMAGE" .

CONTAINER=$(buildah from "$IMAGE")
FOLDER=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; buildah rm "$CONTAINER" >/dev/null; rm -rf "$FOLDER"' EXIT
inside() { buildah run "$CONTAINER" -- "$@"; }

expect "the user" "$(inside id -u):$(inside id -g)" 10001:10001
expect "no torch" "$(inside python3 -c 'import importlib.util as u; print(u.find_spec("torch"))')" None
expect "the code cannot be changed" "$(inside sh -c 'touch /opt/kvrecall/x 2>/dev/null || echo refused')" refused
expect "data can be written" "$(inside sh -c 'touch /var/lib/kvrecall/x && echo written')" written

WORKER_PORT=$(free_port) GATEWAY_PORT=$(free_port)
"$KVRECALL" worker --listen "127.0.0.1:$WORKER_PORT" --data "$FOLDER" --slots 2 --budget 256 \
  >"$FOLDER/worker.log" 2>&1 &
buildah run "$CONTAINER" -- kvrecall gateway --host 127.0.0.1 --port "$GATEWAY_PORT" \
  --worker "127.0.0.1:$WORKER_PORT" >"$FOLDER/gateway.log" 2>&1 &
await "http://127.0.0.1:$GATEWAY_PORT/readyz" || { tail -n 20 "$FOLDER/gateway.log" >&2; exit 1; }
echo "ok: the gateway is ready beside a worker"
ANSWER=$(python3 - "http://127.0.0.1:$GATEWAY_PORT/v1/sessions" <<'PYTHON'
import json, sys, urllib.request
def post(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
session = post(sys.argv[1], {"budget": 128})["id"]
turn = post(f"{sys.argv[1]}/{session}/turns", {"messages": [{"role": "user", "content": "Hello."}]})
print(turn["turn"])
PYTHON
)
expect "a turn through it" "$ANSWER" 1
