"""Fixed answers of the stub worker, and its words as tokens and vectors."""

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import groupby, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrecall.domain.page_ids import ID_BYTES, PageNames, join_ids, split_ids
from kvrecall.domain.settings.session import WorkerOptions
from kvrecall.protocol.v1 import worker_pb2 as pb

PAGE_TOKENS = 4


def worker_info() -> pb.WorkerInfo:
    """Describe a tiny model with pages of four tokens."""
    return pb.WorkerInfo(
        model="scripted",
        fingerprint="f00d",
        layers=2,
        kv_heads=1,
        head_dim=4,
        slots=4,
        max_budget=1024,
        min_budget=16,
        block_tokens=32,
        max_context=4096,
        call_format="hermes",
        methods=[
            pb.MethodInfo(
                name="icecache",
                summary="rows found for every token",
                settings_schema="{}",
                retrieves=True,
            ),
            pb.MethodInfo(
                name="snapkv", summary="the last window's attention", settings_schema="{}"
            ),
            pb.MethodInfo(name="full", summary="keeps everything", settings_schema="{}"),
            pb.MethodInfo(
                name="epicache",
                summary="an episode's attention",
                settings_schema="{}",
                episodes=True,
            ),
        ],
        repair=pb.MethodInfo(
            name="repairkv", summary="bursts around anchors", settings_schema="{}"
        ),
        prefill=pb.MethodInfo(name="prefill", summary="lines of blocks", settings_schema="{}"),
        retrieve=pb.MethodInfo(name="retrieval", summary="rows of a step", settings_schema="{}"),
        page_tokens=PAGE_TOKENS,
        token_bytes=64,
    )


def worker_stats(sessions: int) -> pb.WorkerStats:
    """Counters with a different value each; `sessions` are open and resident."""
    tiers = {
        "ram": pb.TierStats(bytes=640, limit_bytes=1000, hits=3, misses=1, reads=4, read_bytes=256),
        "nvme": pb.TierStats(
            bytes=1280,
            errors=2,
            refused_pages=5,
            writes=7,
            written_bytes=512,
            write_seconds=0.5,
        ),
    }
    return pb.WorkerStats(
        slots_in_use=sessions,
        sessions=sessions,
        tiers=tiers,
        lost_pages=3,
        rebuilt_pages=2,
        prefilled_tokens=11,
    )


def words_of_message(message: pb.Message) -> list[str]:
    """Split a message into words: its role, its text, its calls."""
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return [message.role, *" ".join([message.content, *calls]).split()]


def words_of_signal(request: pb.RepairRequest, words: Mapping[int, str]) -> list[str]:
    """Return the words that a repair is conditioned on; `words` are known by their tokens."""
    said = [word for message in request.messages for word in words_of_message(message)]
    return request.text.split() + said + [words[token] for token in request.token_ids]


def utterance_tokens(request: pb.TurnRequest | pb.TokenizeRequest) -> list[int]:
    """Count the words of each side's consecutive messages."""
    runs = groupby(request.messages, lambda message: message.role == "assistant")
    return [sum(len(words_of_message(message)) for message in run) for _, run in runs]


def embed_words(text: str, dimensions: int) -> NDArray[np.float64]:
    """Add a random direction per word up to a unit vector: texts that share words are similar."""
    words = text.lower().split() or [""]
    directions = [
        np.random.default_rng(token_of_word(word)).standard_normal(dimensions) for word in words
    ]
    total: NDArray[np.float64] = np.sum(directions, axis=0)
    unit: NDArray[np.float64] = total / np.linalg.norm(total)
    return unit


def token_of_word(word: str) -> int:
    """Map a word to a token id under 65,536."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big")


def memory_report(state: pb.SessionState, budget: int) -> pb.MemoryReport:
    """Build the report of a session in a slot: its last `budget` words are active."""
    active = min(state.length, budget)
    return pb.MemoryReport(
        length=state.length,
        budget=budget,
        active_rows=[active, active - 1 if active else 0],
        peak_rows=[active + 2, active],
        bound_rows=[budget + 32, budget + 32],
        active_bytes=active * 64,
        evicted_rows=state.length - active,
        promoted_rows=state.promoted_rows,
        unsettled=state.unsettled,
        tier_bytes={"ram": state.length * 64},
        in_slot=True,
        retrieval_bytes=state.length * 8,
    )


def take_pending(state: pb.SessionState) -> list[int]:
    """Give the pending words rows, as a turn does before its own; return them."""
    taken = list(state.pending)
    state.length += len(taken)
    state.ClearField("pending")
    state.ClearField("unsettled")
    return taken


def settle_words(state: pb.SessionState) -> int:
    """Give the unsettled words rows; return their number."""
    settled = state.unsettled
    state.length += settled
    state.unsettled = 0
    state.pending[:] = state.pending[settled:]
    return settled


def drop_answer(
    state: pb.SessionState, start: int, before: list[int], prompt: list[str], answer: list[str]
) -> None:
    """Leave the words of an answer pending.

    `before` were pending, after `start` rows.
    """
    words = before + [token_of_word(word) for word in prompt + answer]
    length = start + len(before) + len(prompt)
    state.pending[:] = words[length - start :]
    state.unsettled = len(state.pending)
    state.length = length


def name_pages(state: pb.SessionState, row_key: bytes, first: list[str]) -> None:
    """Name the whole pages of the words that have rows.

    Those of a first turn's words, `first`, by these; later ones by the page before and all that ever
    changed the session.
    """
    ids = list(split_ids(state.page_ids))[: state.length // PAGE_TOKENS]
    ids = ids or name_words(row_key, first)[: state.length // PAGE_TOKENS]
    while len(ids) < state.length // PAGE_TOKENS:
        changed = b"".join(ids[-1:]) + state.selection
        ids.append(hashlib.sha256(changed).digest()[:ID_BYTES])
    state.page_ids = join_ids(ids)


def map_words(request: pb.MapRowsRequest) -> pb.MapRowsResult:
    """Map every word of a state as active in both layers, none as promoted."""
    words = max(0, min(request.stop, request.state.length) - request.start)
    columns = min(request.columns, words)
    cells = pb.LayerCells(active=b"\xff" * columns, promoted=bytes(columns))
    return pb.MapRowsResult(
        layers=[cells, cells] if columns else [],
        rows=b"\x01" * (2 * words if request.tokens else 0),
        scores=[math.nan] * (words if request.tokens else 0),
        sinks=2,
        recent=3,
    )


def name_words(row_key: bytes, words: list[str]) -> list[bytes]:
    """Name the whole pages of a new session's first words."""
    whole = len(words) // PAGE_TOKENS * PAGE_TOKENS
    names = PageNames(row_key, b"words", PAGE_TOKENS)
    return list(names.extend(None, [token_of_word(word) for word in words[:whole]]))


def find_pages(stored: Container[bytes], row_key: bytes, words: list[str]) -> int:
    """Count the stored pages that a prompt begins with, but for its last word."""
    named = name_words(row_key, words[:-1])
    return sum(1 for _ in takewhile(lambda id: id in stored, named))


def pause_repair_report(trigger: str, signal_tokens: int, cut: bool) -> pb.RepairReport:
    """Build the report of a repair in a pause; one that was `cut` scored half of its rows."""
    return pb.RepairReport(
        trigger=trigger,
        signal_tokens=signal_tokens,
        observed_tokens=signal_tokens,
        scored_rows=4 if cut else 8,
        candidates=8,
        promoted=[1, 2],
        seconds=0.5,
        demoted_rows=1,
        truncated=cut,
        bytes_read=640,
    )


def turn_reports(
    request: pb.TurnRequest, options: WorkerOptions, signal_tokens: int
) -> dict[str, Any]:
    """Build a turn's reports by their names: what it has beside its answer."""
    reports: dict[str, Any] = {}
    if request.repair:
        reports["repair"] = pb.RepairReport(
            trigger="turn",
            signal_tokens=signal_tokens,
            observed_tokens=signal_tokens,
            scored_rows=6,
            candidates=6,
            promoted=[0, 1, 3],
            seconds=0.1,
            bytes_read=320,
        )
    if request.sampling.HasField("prompt_logprobs"):
        reports["prompt_logprobs"] = prompt_scores(signal_tokens)
    if request.compare_with:
        reports["fidelity"] = pb.Fidelity(tokens=5, kl_mean=0.5, top1_agreement=0.8)
    if options.reselect is not None and request.generate:
        reports["reselections"] = pb.ReselectionReport(
            count=2, rows_in=40, rows_out=30, seconds=0.25
        )
    if options.prefill is not None and options.prefill.sparse != "off":
        reports["prefill"] = pb.PrefillReport(
            blocks=2, cover_min=0.9375, cover_mean=0.96875, density=0.25
        )
    if request.remembered:
        tokens = sum(each.stop - each.start for each in request.remembered)
        reports["remembered"] = pb.RememberedReport(
            passages=len(request.remembered), tokens=tokens, behind=1
        )
    if options.retrieve is not None and request.generate:
        reports["retrieval"] = pb.RetrievalReport(steps=5, rows=80, seconds=0.125)
    return reports


def prompt_scores(tokens: int) -> list[pb.TokenLogprob]:
    """Build the log-probabilities of a prompt, after the first token of which all are as likely."""
    scores = [math.nan, *[-0.5] * (tokens - 1)][:tokens]
    return [pb.TokenLogprob(token="w", utf8=b"w", logprob=score) for score in scores]


def switch_report(episode: pb.Episode) -> pb.SwitchReport:
    """Build the report of a switch to an episode."""
    return pb.SwitchReport(
        episode=episode.id, rows_moved=20, rows_kept=80, bytes_moved=1280, seconds=0.01
    )


def worker_record(name: str, *, draining: bool) -> pb.WorkerRecord:
    """Build the record of a worker with four slots and one session."""
    return pb.WorkerRecord(
        name=name, address=f"{name}:1", slots=4, free_slots=3, sessions=1, draining=draining
    )


def built_episode(plan: pb.EpisodePlan, length: int) -> pb.Episode:
    """Build the episode of a plan in a session of `length` words."""
    return pb.Episode(
        id=plan.id,
        rows=f"rows of {plan.id}".encode(),
        patched_prompt=plan.patched_prompt,
        length=length,
        segments=plan.segments,
    )


def answer_message(generate: bool, answer: str | list[pb.ToolCall]) -> pb.Message | None:
    """Build the assistant's message; None if nothing was generated."""
    if not generate:
        return None
    if isinstance(answer, str):
        return pb.Message(role="assistant", content=answer)
    return pb.Message(role="assistant", tool_calls=answer)


def split_arguments(index: int, call: pb.ToolCall) -> Iterator[pb.ArgumentsDelta]:
    """Yield the arguments of an answer's call in pieces of five characters."""
    for start in range(0, len(call.arguments), 5):
        piece = call.arguments[start : start + 5]
        yield pb.ArgumentsDelta(index=index, id=call.id, name=call.name, arguments=piece)


def cut_at_stop(text: str, stops: Iterable[str]) -> tuple[str, str]:
    """Cut a text before the first of the stop strings in it; returns the text and that string."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, ""
    end, stop = min(found)
    return text[:end].rstrip(), stop


def finish(message: pb.Message | None, max_tokens: int) -> str:
    """Return why an answer ended, and cut it to `max_tokens` words (0: it is left alone)."""
    if message is None:
        return "appended"
    words = message.content.split()
    if 0 < max_tokens < len(words):
        message.content = " ".join(words[:max_tokens])
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
