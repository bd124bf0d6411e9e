"""Results of a replay: tables in the terminal, rows of the result file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from kvrecall_server.replay.playback import ReplayedTurn, ReplayResult, SessionOptions
from kvrecall_server.reporting.results import Row, bootstrap, quality_row, speed_row
from kvrecall_server.reporting.units import readable_bytes

MAX_LINES = 24
Value = Callable[[ReplayedTurn], float | None]


def conversation_lines(replayed: Sequence[ReplayResult]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table by conversation: at most `MAX_LINES`, then one for all."""
    lines = [
        [each.name, str(len(each.turns)), f"{_tokens(each.turns):,}", *_cells(each.turns)]
        for each in replayed
    ]
    if len(replayed) > MAX_LINES:
        lines[MAX_LINES:] = [
            [f"and {len(replayed) - MAX_LINES} more", *[""] * (2 + len(_MEASURES))]
        ]
    every = [turn for each in replayed for turn in each.turns]
    tokens = sum(_tokens(each.turns) for each in replayed)
    return ["conversation", "turns", "tokens", *_MEASURES], [
        *lines,
        ["all", str(len(every)), f"{tokens:,}", *_cells(every)],
    ]


def conversations_table(replayed: Sequence[ReplayResult]) -> Table:
    """One line per conversation, and one for all."""
    head, lines = conversation_lines(replayed)
    table = _table(f"{len(replayed)} conversations", head)
    for line in lines[:-1]:
        table.add_row(*line)
    table.add_section()
    table.add_row(*lines[-1])
    return table


def turns_table(replayed: ReplayResult) -> Table:
    """One line per turn."""
    table = _table(replayed.name, ["turn", "tokens", *_MEASURES])
    for turn in replayed.turns:
        number = str(turn.turn) if replayed.parts == 1 else f"{turn.part}.{turn.turn}"
        table.add_row(number, f"{turn.length:,}", *_cells([turn]))
    table.add_section()
    table.add_row("all", f"{_tokens(replayed.turns):,}", *_cells(replayed.turns))
    return table


def tiers_line(replayed: Sequence[ReplayResult]) -> str:
    """One line with the peak bytes of each tier."""
    peaks: dict[str, int] = {}
    for turn in (turn for each in replayed for turn in each.turns):
        for tier, size in turn.tier_bytes.items():
            peaks[tier] = max(size, peaks.get(tier, 0))
    return "peak bytes by tier: " + ", ".join(
        f"{tier} {readable_bytes(size)}" for tier, size in peaks.items()
    )


def notes(replayed: Iterable[ReplayResult]) -> list[str]:
    """One line for each conversation that was split or truncated."""
    lines = []
    for each in replayed:
        if each.parts > 1:
            lines.append(
                f"{each.name}: longer than the model's context, replayed as {each.parts} sessions"
            )
        if each.truncated_characters:
            lines.append(
                f"{each.name}: {each.truncated_characters:,} characters truncated that do not fit "
                "the context"
            )
    return lines


def result_rows(replayed: Sequence[ReplayResult], options: SessionOptions) -> list[Row]:
    """Rows of the result file: means over turns, medians of seconds, then every turn."""
    turns = [turn for each in replayed for turn in each.turns]
    common = {"method": options.method, "k": options.repair_rows, "budget": options.budget}
    return [
        *_quality_rows(turns, common),
        *_speed_rows(turns),
        *({**common, **_turn_row(turn)} for turn in turns),
    ]


def _quality_rows(turns: Sequence[ReplayedTurn], common: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    active = max((turn.active_rows for turn in turns), default=0)
    for condition, value in (("mean KL, nats", _kl), ("top-1 agreement", _agreement)):
        estimate = bootstrap([found for turn in turns if (found := value(turn)) is not None])
        if estimate is not None:
            rows.append(quality_row(condition, estimate, **common, active_rows=active))
    return rows


def _speed_rows(turns: Sequence[ReplayedTurn]) -> list[Row]:
    measures: list[tuple[str, str, Callable[[ReplayedTurn], float]]] = [
        ("time to first token", "seconds", lambda turn: turn.first_token),
        ("turn", "seconds", lambda turn: turn.seconds),
        ("repair per turn", "seconds", lambda turn: turn.repair_seconds),
        ("active bytes", "bytes", lambda turn: turn.active_bytes),
    ]
    return [
        speed_row("replay", metric, unit, [value(turn) for turn in turns])
        for metric, unit, value in measures
        if turns
    ]


def _turn_row(turn: ReplayedTurn) -> Row:
    return {"condition": f"{turn.conversation}, turn {turn.turn}", **vars(turn)}


def _table(title: str, head: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.caption = (
        "active, evicted: peak rows; KiB: peak active bytes; "
        "first s: median seconds to the first token;\n"
        "KL (nats) and top-1: next-token distributions over recorded replies against the full cache"
    )
    for index, name in enumerate(head):
        table.add_column(
            name, justify="left" if index == 0 else "right", no_wrap=True, overflow="ellipsis"
        )
    return table


_MEASURES = ("active", "evicted", "promoted", "KiB", "first s", "KL", "top-1")


def _cells(turns: Sequence[ReplayedTurn]) -> list[str]:
    if not turns:
        return ["-"] * len(_MEASURES)
    return [
        str(max(turn.active_rows for turn in turns)),
        f"{max(turn.evicted_rows for turn in turns):,}",
        f"{sum(turn.promoted for turn in turns):,}",
        f"{max(turn.active_bytes for turn in turns) / 1024:,.0f}",
        f"{median(turn.first_token for turn in turns):.3f}",
        _mean(turns, _kl),
        _mean(turns, _agreement),
    ]


def _mean(turns: Iterable[ReplayedTurn], value: Value) -> str:
    """Mean over the compared tokens."""
    weighted = [(turn.compared_tokens, mean) for turn in turns if (mean := value(turn)) is not None]
    tokens = sum(count for count, _ in weighted)
    return f"{sum(count * mean for count, mean in weighted) / tokens:.3f}" if tokens else "-"


def _kl(turn: ReplayedTurn) -> float | None:
    return turn.kl_mean


def _agreement(turn: ReplayedTurn) -> float | None:
    return turn.top1_agreement


def _tokens(turns: Sequence[ReplayedTurn]) -> int:
    """Sum of the parts' final lengths."""
    longest: dict[int, int] = {}
    for turn in turns:
        longest[turn.part] = max(turn.length, longest.get(turn.part, 0))
    return sum(longest.values())
