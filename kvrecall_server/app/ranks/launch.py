"""Start of a worker's ranks by torch's launcher, which ends all of them when one has ended."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import structlog

from kvrecall_server.app.errors import CannotServe

# Beyond the time of a drain, in which a rank ends before it is killed.
_CLOSING_SECONDS = 10
_MONITOR_SECONDS = 0.25
# A rank looks so often whether its launcher is there.
_WATCH_SECONDS = 0.5
# Runs of our own launchers; its process id follows.
_RUN = "kvrecall"
_log = structlog.get_logger("kvrecall.process")


def is_rank() -> bool:
    """Check if torch's launcher, or torchrun, has started this process as one of several ranks."""
    # Jobs of other tools may have left a RANK in the environment.
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Send SIGTERM to this process, a rank, when the one that has started it has ended.

    A rank that still loads, or waits for the others, ends at once then; rank 0 drains, if it serves.
    """
    launcher = _read_launcher(os.environ["TORCHELASTIC_RUN_ID"])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _read_launcher(run_id: str) -> int:
    """Read the process id of this rank's launcher: torchrun is whatever is the parent now.

    One of ours may have been killed since it started this process, so its own id is in the run's.
    """
    name, _, number = run_id.rpartition("-")
    return int(number) if name == _RUN else os.getppid()


def launch_ranks(count: int, drain_seconds: float, arguments: Sequence[str]) -> None:
    """Run the command `kvrecall` with these arguments as `count` ranks, until all have ended.

    SIGTERM and SIGINT stop all of them, each in its own way. Raises CannotServe if a rank fails: then
    the others were ended, within `drain_seconds` and a few more.
    """
    # It takes seconds to import.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"{_RUN}-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
    )
    # Older launchers read it from the environment alone.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(drain_seconds) + _CLOSING_SECONDS)
    config.shutdown_timeout = int(drain_seconds) + _CLOSING_SECONDS
    _log.info("starting ranks", ranks=count)
    try:
        elastic_launch(config, sys.executable)("-m", "kvrecall_server.cli", *arguments)
    except SignalException:
        _log.info("ranks stopped")
    except ChildFailedError as error:
        failed = sorted(error.failures)
        raise CannotServe(
            f"rank {failed[0]} of {count} has ended, and with it the worker; its log says why"
        ) from error
