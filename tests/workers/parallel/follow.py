"""Program of the second rank of the tests' workers: follows one worker after the other.

usage: follow.py; the environment names the group.
"""

import torch

from tests.workers.parallel.follower_plan import PATIENCE, Plan, WiredPlan
from workers.engine.engine import Engine
from workers.parallel.process_group import ProcessGroup
from workers.scheduler.follower import Follower


def main() -> None:
    """Build a part of each worker that rank 0 begins, and follow it; None ends the program."""
    torch.set_num_threads(1)
    group = ProcessGroup.join("cpu", PATIENCE)
    none: Plan | WiredPlan | None = None
    while (plan := group.lead(none)) is not None:
        engine = Engine(plan.build(group))
        Follower(engine).run()
        engine.stored.close()
    group.leave()


if __name__ == "__main__":
    main()
