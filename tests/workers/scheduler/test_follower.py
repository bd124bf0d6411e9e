"""A rank that follows carries out what rank 0 says, and keeps nothing of sessions that rank 0 has released."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.conftest import build_spec
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.parallel.alone import Alone
from workers.parallel.decision import Decision
from workers.scheduler.follower import Follower


class Led(Alone):
    """A rank whose rank 0 says these decisions; of all else it has the same as this one."""

    def __init__(self) -> None:
        self.decisions: Iterator[Decision] = iter(())

    def lead(self, value: Any) -> Any:
        """Return the next decision in place of one."""
        return next(self.decisions) if isinstance(value, Decision) else value


def test_a_session_that_rank_0_releases_is_forgotten(
    loaded: Callable[..., Any], tokenizer: Any, open_store: Callable[..., Any]
) -> None:
    group = Led()
    model = replace(loaded("llama"), group=group)
    engine = Engine(Parts(model, tokenizer, open_store(model), WorkerSettings()))
    follower = Follower(engine)
    runner = follower._runner

    def decide() -> Iterator[Decision]:
        yield Decision("enter", (1,), request=pb.OpenRequest(spec=build_spec("s")))
        yield Decision("start", (1,))
        while runner.jobs:
            yield Decision("advance", (1,))
        assert runner.idle.last_use("s") > 0
        assert "s" in engine.sessions
        yield Decision("unload", session="s")
        yield Decision("close")

    group.decisions = decide()
    follower.run()
    assert runner.idle.seconds_until_due(0.0) is None, "no session is idle here any more"
    assert not engine.sessions
