"""How a new session gets at what was said in earlier ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from evals import harness
from evals.configs import budget_rows
from evals.episodes import embed
from evals.harness import Message, Session, Setup
from evals.suites.earlier.cases import Case
from evals.suites.earlier.remembered_chunks import RememberedChunks
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.scheduler.scheduler import Scheduler

PASSAGES = 5
"""Exchanges that are brought back as text."""
_SUMMARY_TOKENS = 96
_SUMMARIZE = "Summarize what was said, with all names and facts."
_BEFORE = "What was said in earlier conversations:"

# The session to ask a question in, and what is said before the question.
Ask = Callable[[str], tuple[Session, list[Message]]]


def _open_new(worker: Scheduler, setup: Setup, name: str) -> Session:
    spec = harness.build_spec(setup, budget_rows(setup.budget, 0), name)
    return Session(worker, spec)


def _append(session: Session, setup: Setup, messages: Sequence[Message]) -> Session:
    tokenizer = harness.load(setup.model).tokenizer
    for turn in harness.split_turns(messages, tokenizer, setup.block_tokens):
        session.append(turn)
    return session


@contextmanager
def _open_worker(setup: Setup, chunk: int | None) -> Iterator[Scheduler]:
    rows = budget_rows(setup.budget, 0)
    with harness.open_worker(setup, rows, slots=2, chunk_tokens=chunk) as worker:
        yield worker


@contextmanager
def _remember_rows(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """Rows of the earlier sessions, computed there, before those of the new one; whole pages of them."""
    with _open_worker(setup, chunk) as worker:
        earlier = [
            _append(_open_new(worker, setup, f"earlier-{index}"), setup, messages)
            for index, messages in enumerate(case.sessions)
        ]
        lengths = tuple(each.state.length for each in earlier)
        positions = worker.engine.long_sessions
        assert positions.chunks is not None, "a model whose keys can be turned"
        positions.chunks = RememberedChunks(sum(lengths), positions.chunks.size, lengths)
        session = _open_new(worker, setup, "asked")
        first = earlier[0].state
        session.state = pb.SessionState(
            length=sum(lengths),
            page_ids=b"".join(each.state.page_ids for each in earlier),
            selection=first.selection,
            eviction_scores=first.eviction_scores,
            state_version=first.state_version,
            layer_rows=first.layer_rows,
        )
        yield lambda question: (session, [case.system])


@contextmanager
def _continue_one(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """One session of all that was said, with recall, however long."""
    said = [message for each in case.exchanges for message in each]
    with harness.open_session(setup, [case.system, *said], chunk) as session:
        yield lambda question: (session, [])


@contextmanager
def _truncate(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """The newest of all that was said, as much as the model's window holds beside a question."""
    loaded = harness.load(setup.model)
    kept: list[Message] = []
    room = loaded.model.max_context - 2 * harness.TURN_TOKENS
    for exchange in reversed(case.exchanges):
        room -= harness.count_tokens(loaded.tokenizer, exchange)
        if room < 0:
            break
        kept = [*exchange, *kept]
    with harness.open_session(setup, [case.system, *kept], chunk) as session:
        yield lambda question: (session, [])


@contextmanager
def _retrieve_text(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """The exchanges nearest to the question by the sentence encoder, said again before it."""
    exchanges = case.exchanges
    vectors = embed([" ".join(str(each["content"]) for each in said) for said in exchanges])

    def find(question: str) -> list[Message]:
        nearest = np.argsort(vectors @ embed([question])[0])[::-1][:PASSAGES]
        return [message for index in sorted(nearest) for message in exchanges[index]]

    with _open_worker(setup, chunk) as worker:
        session = _open_new(worker, setup, "asked")
        yield lambda question: (session, [case.system, *find(question)])


@contextmanager
def _summarize(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """The model's own summary of each session, in the system message."""
    request: Message = {"role": "user", "content": _SUMMARIZE}
    with _open_worker(setup, chunk) as worker:
        summaries = [
            _append(_open_new(worker, setup, f"earlier-{index}"), setup, messages)
            .ask([request], _SUMMARY_TOKENS)
            .message.content
            for index, messages in enumerate(case.sessions)
        ]
        text = "\n".join([str(case.system["content"]), _BEFORE, *summaries])
        session = _open_new(worker, setup, "asked")
        yield lambda question: (session, [{"role": "system", "content": text}])


@contextmanager
def _bring_nothing(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """A new session that knows of none before it."""
    with _open_worker(setup, chunk) as worker:
        session = _open_new(worker, setup, "asked")
        yield lambda question: (session, [case.system])


ARMS: Mapping[str, Callable[[Setup, Case, int | None], AbstractContextManager[Ask]]] = {
    "rows": _remember_rows,
    "one session": _continue_one,
    "newest text": _truncate,
    "passages": _retrieve_text,
    "summaries": _summarize,
    "nothing": _bring_nothing,
}
