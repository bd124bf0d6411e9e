"""Changes of single sessions in an InMemoryCatalog."""

import time
from dataclasses import replace

from kvrecall.domain.repairs import DueRepair
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from kvrecall.testing._catalog_state import StoredSession, measure_turns
from services.catalog.records import EpisodeSet, ForkCommit, TurnCommit


def build_child(parent: StoredSession, commit: ForkCommit) -> StoredSession:
    """Build a fork from the parent's state at the end of the turn."""
    child = commit.session
    turns = commit.turns
    stored = StoredSession(child, commit.worker_state, refs=child.shared)
    stored.turns = [replace(turn, session=child.id) for turn in parent.turns[:turns]]
    stored.size = measure_turns(stored.turns)
    at_end = turns == parent.session.turns
    now = time.time()
    for call in parent.calls.values():
        if call.turn < turns or (at_end and call.turn == turns):
            stored.put_call(call)
            at = (call.turn, call.position)
            stored.pieces[at] = dict(parent.pieces.get(at, {}))
        elif call.turn == turns:
            stored.put_call(PendingCall(turns, call.position, call.call, last_event_at=now))
    if at_end:
        stored.repairs = list(parent.repairs)
        stored.episodes = parent.episodes
        stored.segments = dict(parent.segments)
        stored.built = dict(parent.built)
    return stored


def append_turn(stored: StoredSession, commit: TurnCommit) -> None:
    """Append a turn with everything it changes of its session."""
    turn = commit.turn
    outcome = turn.outcome
    now = time.time()
    stored.turns.append(turn)
    stored.size += measure_turns([turn])
    stored.session = replace(
        stored.session,
        turns=turn.number,
        updated_at=now,
        output_due=0 if commit.calls else outcome.output_tokens,
        memory=outcome.memory,
    )
    stored.add_commit_point()
    stored.set_lifetime(commit.lifetime)
    if commit.kept is not None:
        stored.states[turn.number] = commit.kept.packed
        stored.states.pop(commit.kept.get_dropped(turn.number) or 0, None)
    stored.worker_state = commit.worker_state
    _count_match(stored, commit)
    _consume_results(stored, commit)
    for position, call in enumerate(commit.calls):
        stored.put_call(PendingCall(turn.number, position, call, last_event_at=now))
    if outcome.own_repair is not None:
        stored.add_repair(turn.number, outcome.own_repair, commit.repaired)
    if commit.shared is not None:
        stored.refs = commit.shared
        stored.reserved = {}


def _count_match(stored: StoredSession, commit: TurnCommit) -> None:
    if stored.episodes == EpisodeSet():
        return
    episodes = tuple(
        replace(episode, matched=episode.matched + (episode.id == commit.matched))
        for episode in stored.episodes.episodes
    )
    stored.episodes = replace(stored.episodes, episodes=episodes, active=commit.active)


def _consume_results(stored: StoredSession, commit: TurnCommit) -> None:
    for call in stored.get_open_calls():
        result = commit.inline_results.get(call.call.id)
        if result is not None:
            call = replace(call, status=CallStatus.COMPLETED, result=result)
        stored.put_call(replace(call, consumed_in_turn=commit.turn.number))


def mark_done(stored: StoredSession, repair: DueRepair) -> None:
    """Mark a repair as done: its signal is used."""
    if repair.trigger is RepairTrigger.LAST_OUTPUT:
        stored.session = replace(stored.session, output_due=0)
        return
    for call in stored.get_open_calls():
        if repair.trigger is RepairTrigger.TOOL_RESULT and call.batch == repair.batch:
            stored.put_call(replace(call, result_repaired=True))
        elif repair.trigger is RepairTrigger.TOOL_CALL and call.position == repair.position:
            stored.put_call(replace(call, call_signal=repair.text))
        elif repair.trigger is RepairTrigger.TOOL_DELTA and call.position == repair.position:
            stored.put_call(replace(call, delta_repaired=repair.reach))


def pair_built(episodes: EpisodeSet, built: tuple[bytes, ...]) -> list[tuple[str, bytes]]:
    """Return each episode's id with its serialized pb.Episode."""
    pairs = zip(episodes.episodes, built, strict=True)
    return [(episode.id, data) for episode, data in pairs]
