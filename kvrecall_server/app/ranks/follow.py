"""What a rank does: it joins the others, and follows rank 0 if it is another one."""

import os
import signal
from typing import TYPE_CHECKING

import structlog

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings

if TYPE_CHECKING:
    from workers.parallel.process_group import ProcessGroup

# A rank that says nothing for so long, while others wait for it, is gone.
PATIENCE_SECONDS = 60.0
EXIT_LOST = 70
"""Status of a rank that has lost the others."""
_log = structlog.get_logger("kvrecall.process")


def join_ranks(settings: Settings) -> "ProcessGroup":
    """Join the ranks that were started together. Raises CannotServe.

    This process ends at once when one of them is gone: nothing that it holds can be finished then.
    """
    import torch

    from workers.parallel.process_group import ProcessGroup

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device_type = "cpu" if accelerator is None else accelerator.type
    count, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if ranks != settings.tensor_parallel:
        raise CannotServe(
            f"--tensor-parallel {settings.tensor_parallel} needs as many processes, and torch's launcher "
            f"has started {ranks}"
        )
    if device_type != "cpu" and torch.accelerator.device_count() < count:
        raise CannotServe(
            f"{count} processes of --tensor-parallel on this machine need as many devices, and there are "
            f"{torch.accelerator.device_count()}"
        )
    return ProcessGroup.join(device_type, PATIENCE_SECONDS, _end)


def follow(settings: Settings) -> None:
    """Follow rank 0 until it closes the worker. Raises CannotServe."""
    from kvrecall_server.app.wiring import build_parts
    from workers.engine.engine import Engine
    from workers.scheduler.follower import Follower

    group = join_ranks(settings)
    engine = Engine(build_parts(settings, group=group))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 says when
    Follower(engine).run()
    engine.stored.close()
    group.leave()


def _end(reason: str) -> None:
    """End this process: a rank is gone, so no exchange, and no step, can end any more."""
    _log.error("lost the other ranks", reason=reason)
    os._exit(EXIT_LOST)
