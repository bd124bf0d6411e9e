"""Program of one process of a worker that is measured: all of it, or one rank, as torch's launcher starts it.

usage: program.py DATA SIZES, which are JSON. Rank 0 writes a line when it is ready. Then each line of its input asks
for a turn, a method, a text and a number of tokens as JSON, and the line in answer has the turn's times. It
ends with its input; the others follow it.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.ranks.sizes import Sizes
from benchmarks.subjects import KvrecallChat, Worker, without_end_of_turn
from kvrecall.domain.settings.methods import FULL_CACHE, RECALL
from kvrecall_server.app.wiring import build_store
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.parallel.process_group import ProcessGroup
from workers.scheduler.follower import Follower
from workers.scheduler.scheduler import Scheduler

FULL, DEFAULT = "full cache", "the default"
_PATIENCE_SECONDS = 60.0
_STORE_BYTES = 1 << 30


def main(data: Path, sizes: Sizes, out: TextIO) -> None:
    """Load this process's part of the model, and lead or follow."""
    torch.set_num_threads(sizes.threads)
    group: Group = Alone()
    if "RANK" in os.environ:
        group = ProcessGroup.join("cpu", _PATIENCE_SECONDS)
    parts = build_parts(data / str(group.index), sizes, group)
    group.meet()
    engine = Engine(parts)
    if not sizes.native_steps:
        engine.decoder = None
    if group.index:
        Follower(engine).run()
        parts.store.close()
    else:
        answer_turns(Worker(Scheduler(engine)), sizes, out)
    if isinstance(group, ProcessGroup):
        group.leave()


def build_parts(data: Path, sizes: Sizes, group: Group) -> Parts:
    """Build a process's dependencies."""
    loaded = load_model(sizes.model, device="cpu", group=group)
    model, tokenizer = without_end_of_turn(
        loaded, load_tokenizer(sizes.model, loaded.eos_token_ids)
    )
    settings = WorkerSettings(slots=2, max_budget=sizes.rows, block_tokens=sizes.block)
    return Parts(model, tokenizer, build_store(model, data, _STORE_BYTES), settings)


def answer_turns(worker: Worker, sizes: Sizes, out: TextIO) -> None:
    """Answer the turns that are asked for, until the input ends."""
    sessions = {
        FULL: KvrecallChat(FULL, worker, FULL_CACHE, sizes.rows),
        DEFAULT: KvrecallChat(DEFAULT, worker, RECALL, sizes.budget),
    }
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        method, text, tokens = json.loads(line)
        timed = sessions[method].turn(text, tokens)
        print(json.dumps(asdict(timed)), file=out, flush=True)
    worker.close()


def take_output() -> TextIO:
    """Take the standard output for answers; what libraries print goes to the standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]), Sizes(**json.loads(sys.argv[2])), take_output())
