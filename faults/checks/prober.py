"""`python -m faults.checks.prober TARGETS OUT`: asks for the health of processes.

TARGETS is a JSON object: names of processes to `{"port": ..., "grpc": ..., "pid": FILE}`. To OUT it
writes a line of JSON for each answer or failure: name, monotonic time of the request, seconds until
its end, whether it was answered, and the seconds that threads waited for a CPU meanwhile: those of
the process and of this one. Last, the seconds that the process has waited since its start.
In a process of its own, so that the clients' threads do not delay it.
"""

import http.client
import json
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

PERIOD_SECONDS = 0.5
# Longer than every bound, shorter than a round.
PATIENCE_SECONDS = 60.0
_NANOSECONDS = 1e9


def waited(pid_file: Path) -> float:
    """Seconds that all threads of a command's processes were ready to run and had no CPU, so far."""
    with suppress(OSError):
        return sum(map(waited_of, pid_file.read_text().split()))
    return 0.0


def waited_of(process: str) -> float:
    """Seconds that all threads of a process, by its id or `self`, waited for a CPU, so far."""
    total = 0
    with suppress(OSError, ValueError):
        for task in (Path("/proc") / process / "task").iterdir():
            with suppress(OSError, IndexError):
                total += int((task / "schedstat").read_text().split()[1])
    return total / _NANOSECONDS


def ask_http(port: int) -> bool:
    """GET /healthz on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def ask_grpc(stub: Any, request: Any) -> bool:
    """grpc.health.v1.Health/Check."""
    import grpc

    try:
        stub.Check(request, timeout=PATIENCE_SECONDS, wait_for_ready=False)
    except grpc.RpcError:
        return False
    return True


def probe(name: str, target: dict[str, Any], out: Any, lock: threading.Lock) -> None:
    """Ask one process again and again."""
    if target["grpc"]:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        options = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        channel = grpc.insecure_channel(f"127.0.0.1:{target['port']}", options)
        stub = health_pb2_grpc.HealthStub(channel)
        ask = partial(ask_grpc, stub, health_pb2.HealthCheckRequest())
    else:
        ask = partial(ask_http, target["port"])
    pid_file = Path(target["pid"])
    while True:
        before = waited(pid_file) + waited_of("self")
        start = time.monotonic()
        answered = ask()
        seconds = time.monotonic() - start
        queued = waited(pid_file)
        # A thread that ended meanwhile, or a process that was replaced, takes its waits with it.
        meanwhile = max(0.0, queued + waited_of("self") - before)
        line = json.dumps([name, start, seconds, answered, meanwhile, queued])
        with lock:
            out.write(line + "\n")
            out.flush()
        time.sleep(PERIOD_SECONDS)


def main() -> None:
    """Probe all targets until standard input ends."""
    targets = json.loads(sys.argv[1])
    lock = threading.Lock()
    with open(sys.argv[2], "a", encoding="utf-8") as out:
        for name, target in targets.items():
            threading.Thread(target=probe, args=(name, target, out, lock), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
