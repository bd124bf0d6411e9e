"""Suite fidelity: recorded conversations under every method and budget, beside the full cache.

Without recordings, generated conversations. Each turn is appended to a session with the full cache
and, at each budget, to one of the method. The measure is the distance between their next-token
distributions over the recorded replies. A session of a method with episodes builds them as the
service would, at moments that follow from the conversation alone, and matches each turn with the
user's words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evals import episodes, harness
from evals.configs import FULL, RunConfig, budget_rows, parse_config
from evals.harness import Message, Session, Setup
from evals.languages.choice import get_language
from evals.recordings import RecordingPlace, list_recordings, read_recording
from evals.suite import Record, Suite
from evals.suites.longconv.conversations import generate_topics
from evals.summary import group_by, mean_row
from kvrecall.domain.episodes import rebuild_due
from kvrecall.domain.utterances import query_text
from kvrecall.protocol.convert import chat_to_wire, message_from_wire
from kvrecall_server.reporting.results import Row
from workers.model.tokenizer import ChatTokenizer

BUDGETS = ("128", "256", "512", "1024")
GENERATED = "generated"
# Generated conversations unless a number is asked for, and their topics.
_GENERATED = 4
_TOPICS = 4
# An upper bound on the template's tokens around a message's own.
_TEMPLATE_TOKENS = 24


@dataclass(frozen=True)
class Replay:
    """The first `tokens` tokens of one recording under one configuration, at all budgets."""

    setup: Setup
    budgets: tuple[str, ...]
    place: RecordingPlace
    tokens: int

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.setup.config.name}, {self.place.source} {self.place.number + 1}"


def suite(
    setup: Setup,
    configs: Sequence[RunConfig],
    budgets: Sequence[str],
    sources: Sequence[Path],
    limit: int | None,
    tokens: int,
) -> Suite[Replay]:
    """Every configuration on the first `limit` recordings of each source, a file or a folder.

    Without sources the conversations are generated in the model's language. Raises BadDataFile.
    """
    units = [
        Replay(replace(setup, config=config), tuple(budgets), place, tokens)
        for place in list_places(sources, limit, setup.seed)
        for config in configs
        if config.evicts
    ]
    return Suite(
        "fidelity",
        setup.seed,
        setup.model,
        tuple(units),
        run,
        partial(result_rows, seed=setup.seed),
    )


def list_places(sources: Sequence[Path], limit: int | None, seed: int) -> list[RecordingPlace]:
    """The first `limit` recordings of each source; generated ones, by their seeds, without sources.

    Raises BadDataFile, BadReplayFile.
    """
    if not sources:
        return [
            RecordingPlace(GENERATED, "", number)
            for number in range(seed, seed + (limit or _GENERATED))
        ]
    return [place for source in sources for place in list_recordings(source)[:limit]]


def read_messages(place: RecordingPlace, model: str, tokens: int) -> tuple[str, Sequence[Message]]:
    """Name and messages of a recording; a generated one is small talk of about `tokens` tokens.

    Raises BadReplayFile.
    """
    if place.path:
        recording = read_recording(place)
        return recording.name, recording.messages
    conversation = generate_topics(place.number, tokens, _TOPICS, 0, get_language(model))
    return f"seed {place.number}", conversation.messages()


def run(unit: Replay) -> list[Record]:
    """Append the recording turn by turn to all sessions. Raises `workers.errors`."""
    setup = unit.setup
    loaded = harness.load(setup.model)
    tokens = min(unit.tokens, loaded.model.max_context)
    name, messages = read_messages(unit.place, setup.model, tokens)
    turns = fit_turns(messages, loaded.tokenizer, tokens)
    budgets = {budget: budget_rows(budget, tokens) for budget in unit.budgets}
    slot_rows = max(tokens, *budgets.values())
    with harness.open_worker(setup, slot_rows, slots=1 + len(budgets)) as worker:
        full_setup = replace(setup, config=parse_config(FULL))
        full = Session(worker, harness.build_spec(full_setup, tokens, FULL))
        compressed = {
            budget: _BudgetedSession(unit, Session(worker, harness.build_spec(setup, rows, budget)))
            for budget, rows in budgets.items()
        }
        records = list[Record]()
        for number, turn in enumerate(turns):
            full.append(turn, keep_distribution=turn[-1]["role"] == "assistant")
            for budget, each in compressed.items():
                records += each.append(turn, budget, number, name)
    return records


@dataclass
class _BudgetedSession:
    """A session under a budget with its episodes."""

    unit: Replay
    session: Session
    built: episodes.BuiltEpisodes | None = None
    segments: int = 0

    def append(
        self, turn: Sequence[Message], budget: str, number: int, recording: str
    ) -> Iterator[Record]:
        """Append a turn; yields a record on its distance from the full cache if it has a reply."""
        has_reply = turn[-1]["role"] == "assistant"
        matched = episodes.match_text(self.built, user_text(turn))
        done = self.session.append(
            turn,
            compare_with=FULL if has_reply else "",
            episode=matched.episode if matched else None,
        )
        self._build_if_due()
        if not has_reply:
            return
        yield {
            "data": self.unit.place.source,
            "recording": recording,
            "turn": number,
            "arm": self.unit.setup.config.name,
            "budget": budget,
            "rows": self.session.spec.budget,
            "length": done.memory.length,
            "active_rows": round(harness.active_rows(self.session), 2),
            "heard": done.fidelity.tokens,
            "kl": done.fidelity.kl_mean,
            "top1": done.fidelity.top1_agreement,
        }

    def _build_if_due(self) -> None:
        setup = self.unit.setup
        if setup.config.build == "none":
            return
        settings = episodes.settings_for(setup)
        segments = len(self.session.utterances) // settings.segment_utterances
        length = self.session.memory.length
        budget = self.session.spec.budget
        if rebuild_due(
            settings, segments=segments, built=self.segments, length=length, budget=budget
        ):
            self.built = episodes.build(self.session, settings)
            self.segments = segments


def user_text(turn: Sequence[Message]) -> str:
    """The user's words in a turn, with which it is matched."""
    return query_text([message_from_wire(chat_to_wire(dict(message))) for message in turn])


def fit_turns(
    messages: Sequence[Message], tokenizer: ChatTokenizer, tokens: int
) -> list[list[Message]]:
    """The first turns of a conversation that are certain to fit into `tokens` tokens.

    Each turn ends in an assistant's message.
    """
    turns: list[list[Message]] = [[]]
    size = 0
    for message in messages:
        calls = str(message.get("tool_calls") or "")
        size += len(tokenizer.encode(f"{message['content']}{calls}")) + _TEMPLATE_TOKENS
        if size > tokens:
            return turns[:-1]
        turns[-1].append(message)
        if message["role"] == "assistant":
            turns.append([])
    return [turn for turn in turns if turn]


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Means over the turns of all recordings of a source, by method and budget."""
    rows: list[Row] = []
    for (data, config, budget), group in group_by(records, "data", "arm", "budget").items():
        columns: Mapping[str, Any] = {
            "method": config,
            "k": 0,
            "budget": group[0]["rows"],
            "share": budget,
            "active_rows": max(each["active_rows"] for each in group),
            "tokens_heard": sum(each["heard"] for each in group),
        }
        for name, key in (("mean KL, nats", "kl"), ("top-1 agreement", "top1")):
            rows += mean_row(f"{data}: {name}", [each[key] for each in group], seed, **columns)
    return rows
