"""The check of a whole session: what import takes and fsck finds clean is the same."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from kvrecall.domain.rewrites.rewrite import Rewrite
from kvrecall.domain.settings.session import MAX_CACHE_SALT, MAX_MEMORY_NAME
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.admin.validation.bounds import Bounds
from kvrecall_server.admin.validation.state import (
    check_rows,
    check_spans,
    check_state,
    check_tokens,
    parse_state,
)
from kvrecall_server.admin.validation.values import check_values, is_id
from services.catalog.records import REPAIRS_RETAINED, SessionDump
from services.catalog.token_log import count_tokens

# An epoch grows by one with each takeover.
_MOST_EPOCHS = 1 << 31
# Pieces of one call's output; more are never taken (`max_output_pieces` is 16,384).
_MOST_PIECES = 1 << 20
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def validate_session(dump: SessionDump, bounds: Bounds) -> list[str]:
    """Return what is wrong with a session, each as a sentence's end; empty if nothing is.

    Whoever uses a session without findings may trust that its log, its state and its pages add up.
    """
    for check in (_check_head, _check_values, _check_turns, _check_content):
        # Later checks rely on earlier ones.
        if found := list(check(dump, bounds)):
            return found
    return []


def _check_head(dump: SessionDump, bounds: Bounds) -> Iterator[str]:
    session = dump.session
    origin = session.settings.forked_from
    for id in (session.id, *([] if origin is None else [origin.session])):
        if not is_id(id):
            yield f"{id[:80]!r} is no id of a session: up to 128 letters, digits, - and _"
    if not 0 < session.epoch < _MOST_EPOCHS:
        yield f"its epoch is {session.epoch}, and must be from 1 to {_MOST_EPOCHS - 1}"
    if session.turns != len(dump.turns):
        yield f"it has {session.turns} turns, and its turn log has {len(dump.turns)}"
    yield from _check_object(session.settings.template_arguments, "template_arguments")
    for tool in session.settings.tools:
        yield from _check_object(tool, "a tool")
    if not 0 <= session.settings.seed < 1 << 63:
        yield f"its seed is {session.settings.seed}, and must be from 0 to 2^63"
    if (count := len(session.settings.cache_salt)) > MAX_CACHE_SALT:
        yield f"its cache_salt has {count} characters, and may have {MAX_CACHE_SALT}"
    if (count := len(session.settings.remember)) > MAX_MEMORY_NAME:
        yield f"the name of its memory has {count} characters, and may have {MAX_MEMORY_NAME}"


def _check_values(dump: SessionDump, bounds: Bounds) -> Iterator[str]:
    # A seed may be larger than other numbers: it is checked with the head.
    yield from check_values(replace(dump.session.settings, seed=0), "its settings")
    yield from check_values((dump.session.memory, dump.session.repairs), "its memory")
    yield from check_values((dump.session.created_at, dump.session.updated_at), "its times")
    for turn in dump.turns:
        yield from check_values((turn.messages, turn.outcome), f"turn {turn.number}")
    yield from check_values((dump.calls, dump.pieces), "its calls")
    yield from check_values(dump.repairs, "its repairs")
    yield from check_values((dump.episodes, dump.segments), "its episodes")


def _check_turns(dump: SessionDump, bounds: Bounds) -> Iterator[str]:
    logged = 0
    for expected, turn in enumerate(dump.turns, 1):
        tokens, outcome = len(turn.token_ids), turn.outcome
        where = f"turn {turn.number}"
        if turn.number != expected or outcome.turn != expected:
            yield f"{where} stands in the place of turn {expected}"
        if outcome.prompt_tokens + outcome.output_tokens > tokens:
            yield f"{where} counts more tokens than the {tokens} that it has"
        if (rewrite := outcome.rewrite) is not None:
            yield from _check_rewrite(rewrite, logged, where)
            logged -= rewrite.dropped_tokens
        logged += tokens
        if turn.utterance_tokens and sum(turn.utterance_tokens) != tokens:
            yield f"{where} divides {sum(turn.utterance_tokens)} tokens, and has {tokens}"
        answer = () if outcome.message is None else (outcome.message,)
        for message in (*turn.messages, *answer):
            if message.role not in _ROLES:
                yield f"{where} has a message of the role {message.role[:40]!r}"
        yield from check_tokens(turn.token_ids, bounds, where)


def _check_rewrite(rewrite: Rewrite, logged: int, where: str) -> Iterator[str]:
    """Check that the edits of a log of so many tokens are in order and within it."""
    places = [place for each in rewrite.edits for place in (each.start, each.stop)]
    if not places or sorted(places) != places or not rewrite.kept <= places[0]:
        yield f"{where} rewrites tokens in no order"
    if places[-1:] > [logged] or not 0 <= rewrite.kept <= rewrite.rows <= logged:
        yield f"{where} rewrites tokens that are not before it"


def _check_content(dump: SessionDump, bounds: Bounds) -> Iterator[str]:
    logged = count_tokens(dump.turns)
    state = parse_state(dump.worker_state)
    if state is None:
        yield "its state cannot be decoded"
        return
    yield from check_state(state, logged, bounds)
    if dump.session.memory.rows != state.length:
        yield f"its memory has {dump.session.memory.rows} rows, its state {state.length}"
    yield from _check_calls(dump)
    yield from _check_repairs(dump, logged + dump.session.memory.dropped_tokens)
    yield from _check_episodes(dump, logged, bounds)


def _check_repairs(dump: SessionDump, logged: int) -> Iterator[str]:
    for repair in dump.repairs:
        last = max(repair.details.positions, default=-1)
        if repair.turn > dump.session.turns + 1 or last >= logged:
            yield f"repair {repair.number} is of a turn or of tokens that it does not have"
    yield from _check_distinct([repair.number for repair in dump.repairs], "repairs")
    if len(dump.repairs) > REPAIRS_RETAINED:
        yield f"it has {len(dump.repairs)} repairs, and {REPAIRS_RETAINED} are kept"


def _check_distinct(names: Sequence[object], kind: str) -> Iterator[str]:
    if len(set(names)) < len(names):
        yield f"two of its {kind} have one number or id"


def _check_calls(dump: SessionDump) -> Iterator[str]:
    for call in dump.calls:
        if not 1 <= call.turn <= dump.session.turns or call.position >= _MOST_PIECES:
            yield f"call {call.call.id[:80]!r} is of turn {call.turn}, which it does not have"
    yield from _check_distinct([(call.turn, call.position) for call in dump.calls], "calls")
    for pieces in dump.pieces.values():
        if max(pieces, default=0) >= _MOST_PIECES:
            yield f"a call's output has piece {max(pieces)}, and at most {_MOST_PIECES} are kept"


def _check_episodes(dump: SessionDump, logged: int, bounds: Bounds) -> Iterator[str]:
    found = dump.episodes
    ids = [episode.id for episode in found.episodes]
    vector_bytes = 4 * found.dimensions
    vectors = [each.vector for each in dump.segments] + [each.centroid for each in found.episodes]
    if any(len(vector) != vector_bytes for vector in vectors):
        yield f"its segments have vectors of another size than {found.dimensions} numbers"
    if len(ids) != len(dump.built) or not all(map(is_id, ids)):
        yield "its episodes and their rows do not belong together"
        return
    if found.next_token > logged or found.segments != len(dump.segments):
        yield f"its episodes are of {found.next_token} tokens and {found.segments} segments"
    for number, segment in enumerate(dump.segments):
        if segment.number != number or not segment.start < segment.stop <= logged:
            yield f"segment {segment.number} is of tokens {segment.start} to {segment.stop}"
        if segment.label >= len(ids) and ids:
            yield f"segment {segment.number} is of an episode that it does not have"
    yield from _check_distinct(ids, "episodes")
    for id, built in zip(ids, dump.built, strict=True):
        yield from _check_built(id, built, logged, bounds)


def _check_built(id: str, built: bytes, logged: int, bounds: Bounds) -> Iterator[str]:
    where = f"episode {id}"
    try:
        episode = pb.Episode.FromString(built)
    except DecodeError:
        yield f"{where} cannot be decoded"
        return
    if episode.id != id or episode.length > logged:
        yield f"{where} is another one, or of more tokens than the {logged} of the session"
    yield from check_tokens(episode.patched_prompt, bounds, where)
    yield from check_spans(episode.segments, logged, where)
    yield from check_rows(episode.rows, logged, where)


def _check_object(text: str, name: str) -> Iterator[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        yield f"{name} is no JSON object"


def describe(findings: Sequence[str]) -> str:
    """Return the first findings as one text."""
    first = "; ".join(findings[:3])
    return f"{first}; and {len(findings) - 3} more" if len(findings) > 3 else first
