"""How a new session gets at what was said in earlier ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from evals import harness
from evals.configs import budget_rows
from evals.episodes import embed
from evals.harness import Message, Session, Setup
from evals.suites.earlier.cases import Case
from evals.suites.earlier.remembered_chunks import RememberedChunks
from kvrecall.domain.page_ids import ID_BYTES
from kvrecall.domain.passages import PASSAGES_PER_TURN, split_exchanges
from kvrecall.domain.utterances import Utterance
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.scheduler.scheduler import Scheduler

_SUMMARY_TOKENS = 96
_SUMMARIZE = "Summarize what was said, with all names and facts."
_BEFORE = "What was said in earlier conversations:"


@dataclass(frozen=True)
class Question:
    """Where a question is asked, what is said before it, and what the turn remembers."""

    session: Session
    lead: Sequence[Message]
    remembered: Sequence[pb.Passage] = ()


Ask = Callable[[str], Question]


def _open_new(worker: Scheduler, setup: Setup, name: str) -> Session:
    spec = harness.build_spec(setup, budget_rows(setup.budget, 0), name)
    return Session(worker, spec)


def _hold(worker: Scheduler, setup: Setup, case: Case) -> list[Session]:
    """Hold the earlier sessions, each on its own."""
    tokenizer = harness.load(setup.model).tokenizer
    sessions = list[Session]()
    for index, messages in enumerate(case.sessions):
        session = _open_new(worker, setup, f"earlier-{index}")
        for turn in harness.split_turns(messages, tokenizer, setup.block_tokens):
            session.append(turn)
        sessions.append(session)
    return sessions


@contextmanager
def _open_worker(setup: Setup, chunk: int | None) -> Iterator[Scheduler]:
    rows = budget_rows(setup.budget, 0)
    with harness.open_worker(setup, rows, slots=2, chunk_tokens=chunk) as worker:
        yield worker


@contextmanager
def _remember_rows(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """Rows of the earlier sessions, computed there, before those of the new one; whole pages of them."""
    with _open_worker(setup, chunk) as worker:
        earlier = _hold(worker, setup, case)
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
        yield lambda question: Question(session, [case.system])


@contextmanager
def _continue_one(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """One session of all that was said, with recall, however long."""
    said = [message for each in case.exchanges for message in each]
    with harness.open_session(setup, [case.system, *said], chunk) as session:
        yield lambda question: Question(session, [])


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
        yield lambda question: Question(session, [])


def _find_nearest(texts: Sequence[str]) -> Callable[[str], list[int]]:
    """Find the texts nearest to a question by the sentence encoder, the nearest last."""
    vectors = embed(texts)
    return lambda question: [
        int(index) for index in np.argsort(vectors @ embed([question])[0])[-PASSAGES_PER_TURN:]
    ]


@contextmanager
def _retrieve_text(
    setup: Setup, case: Case, chunk: int | None, *, as_said: bool = True
) -> Iterator[Ask]:
    """The exchanges nearest to the question, said again before it: as they were said, or the nearest last."""
    exchanges = case.exchanges
    find = _find_nearest([" ".join(str(each["content"]) for each in said) for said in exchanges])

    def repeat(question: str) -> list[Message]:
        nearest = sorted(find(question)) if as_said else find(question)
        return [message for index in nearest for message in exchanges[index]]

    with _open_worker(setup, chunk) as worker:
        session = _open_new(worker, setup, "asked")
        yield lambda question: Question(session, [case.system, *repeat(question)])


def _recall_passages(sessions: Sequence[Session]) -> Callable[[str], list[pb.Passage]]:
    """Recall the exchanges of sessions that are nearest to a question, the nearest last."""
    passages = [
        (session, said) for session in sessions for said in split_exchanges(session.utterances)
    ]
    find = _find_nearest([" ".join(each.text for each in said) for _, said in passages])
    tokens = sessions[0].scheduler.engine.store.layout.page_tokens

    def cut(session: Session, said: Sequence[Utterance]) -> pb.Passage:
        start, stop = said[0].start, said[-1].stop
        first, last = start // tokens, -(-stop // tokens)
        ids = session.state.page_ids[first * ID_BYTES : last * ID_BYTES]
        return pb.Passage(
            # The last tokens of a session have no rows yet.
            page_ids=ids if stop <= session.state.length else b"",
            start=start,
            stop=stop,
            token_ids=session.token_ids[start:stop],
        )

    return lambda question: [cut(*passages[each]) for each in find(question)]


@contextmanager
def _remember_passages(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """Rows of the exchanges nearest to the question, the nearest last, before it. No text is prefilled."""
    with _open_worker(setup, chunk) as worker:
        recall = _recall_passages(_hold(worker, setup, case))
        session = _open_new(worker, setup, "asked")
        yield lambda question: Question(session, [case.system], recall(question))


@contextmanager
def _remember_itself(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """One session of all that was said, which has rows of its own nearest exchanges before the question as well."""
    said = [message for each in case.exchanges for message in each]
    with harness.open_session(setup, [case.system, *said], chunk) as session:
        recall = _recall_passages([session])
        yield lambda question: Question(session, [], recall(question))


@contextmanager
def _summarize(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """The model's own summary of each session, in the system message."""
    request: Message = {"role": "user", "content": _SUMMARIZE}
    with _open_worker(setup, chunk) as worker:
        summaries = [
            session.ask([request], _SUMMARY_TOKENS).message.content
            for session in _hold(worker, setup, case)
        ]
        text = "\n".join([str(case.system["content"]), _BEFORE, *summaries])
        session = _open_new(worker, setup, "asked")
        yield lambda question: Question(session, [{"role": "system", "content": text}])


@contextmanager
def _bring_nothing(setup: Setup, case: Case, chunk: int | None) -> Iterator[Ask]:
    """A new session that knows of none before it."""
    with _open_worker(setup, chunk) as worker:
        session = _open_new(worker, setup, "asked")
        yield lambda question: Question(session, [case.system])


ARMS: Mapping[str, Callable[[Setup, Case, int | None], AbstractContextManager[Ask]]] = {
    "rows": _remember_rows,
    "one session": _continue_one,
    "one session remembering itself": _remember_itself,
    "newest text": _truncate,
    "rows of passages": _remember_passages,
    "passages": _retrieve_text,
    "passages nearest last": partial(_retrieve_text, as_said=False),
    "summaries": _summarize,
    "nothing": _bring_nothing,
}
