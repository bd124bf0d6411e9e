#!/bin/sh
# Replaces the data of a stopped Redis by the backup restored.rdb. Both are in the current directory, and what was
# there before is put into before-restore. docs/operations.md, "Backup and restore", says where to run it.
set -eu

socket=/tmp/restore-redis.$$.sock
ask() { redis-cli -s "$socket" "$@" </dev/null; }

test -f restored.rdb
mkdir before-restore
for each in dump.rdb appendonly*; do
  if [ -e "$each" ]; then mv "$each" before-restore; fi
done
mv restored.rdb dump.rdb

# A Redis without an append-only file reads the copy, and then writes one, from which the one that serves starts.
redis-server --dir "$PWD" --port 0 --unixsocket "$socket" --save '' --appendonly no </dev/null >restore.log &
server=$!
# A server that has ended, by a damaged copy, ends this loop.
until ask ping 2>/dev/null | grep -q PONG; do
  kill -0 "$server" 2>/dev/null || { cat restore.log >&2; exit 1; }
  sleep 0.2
done
ask config set appendonly yes
until ask info persistence | grep -q aof_rewrite_in_progress:0; do sleep 0.2; done
ask info persistence | grep -q aof_last_bgrewrite_status:ok
ask shutdown
wait "$server"
rm restore.log
