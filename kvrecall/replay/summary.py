"""What a replay comes to: tables in the terminal, rows in the result file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from kvrecall.replay.playing import Replayed, ReplayedTurn, SessionOptions
from kvrecall.reporting.results import Row, bootstrap, quality_row, speed_row
from kvrecall.reporting.units import readable_bytes

MOST_LINES = 24
Value = Callable[[ReplayedTurn], float | None]


def conversation_lines(replayed: Sequence[Replayed]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table by conversation: as many as a screen holds, and one for all."""
    lines = [
        [each.name, str(len(each.turns)), f"{_tokens(each.turns):,}", *_cells(each.turns)]
        for each in replayed
    ]
    if len(replayed) > MOST_LINES:
        lines[MOST_LINES:] = [
            [f"and {len(replayed) - MOST_LINES} more", *[""] * (2 + len(_MEASURES))]
        ]
    every = [turn for each in replayed for turn in each.turns]
    tokens = sum(_tokens(each.turns) for each in replayed)
    return ["conversation", "turns", "tokens", *_MEASURES], [
        *lines,
        ["all", str(len(every)), f"{tokens:,}", *_cells(every)],
    ]


def conversations_table(replayed: Sequence[Replayed]) -> Table:
    """One line per conversation, and one for all."""
    head, lines = conversation_lines(replayed)
    table = _table(f"{len(replayed)} conversations", head)
    for line in lines[:-1]:
        table.add_row(*line)
    table.add_section()
    table.add_row(*lines[-1])
    return table


def turns_table(replayed: Replayed) -> Table:
    """One line per turn."""
    table = _table(replayed.name, ["turn", "tokens", *_MEASURES])
    for turn in replayed.turns:
        number = str(turn.turn) if replayed.parts == 1 else f"{turn.part}.{turn.turn}"
        table.add_row(number, f"{turn.length:,}", *_cells([turn]))
    table.add_section()
    table.add_row("all", f"{_tokens(replayed.turns):,}", *_cells(replayed.turns))
    return table


def tiers_line(replayed: Sequence[Replayed]) -> str:
    """The most bytes that each tier ever held."""
    most: dict[str, int] = {}
    for turn in (turn for each in replayed for turn in each.turns):
        for tier, size in turn.tier_bytes.items():
            most[tier] = max(size, most.get(tier, 0))
    return "most bytes in a tier: " + ", ".join(
        f"{tier} {readable_bytes(size)}" for tier, size in most.items()
    )


def notes(replayed: Iterable[Replayed]) -> list[str]:
    """What was split or cut, for the reader to know."""
    found = []
    for each in replayed:
        if each.parts > 1:
            found.append(
                f"{each.name}: longer than the model's context, replayed as {each.parts} sessions"
            )
        if each.cut_characters:
            found.append(
                f"{each.name}: {each.cut_characters:,} characters cut that no context could hold"
            )
    return found


def result_rows(replayed: Sequence[Replayed], options: SessionOptions) -> list[Row]:
    """The result file's rows: means over turns, medians of seconds, then every turn."""
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
        "active, evicted: most rows; KiB: most active bytes; first s: median seconds to the first token;\n"
        "KL (nats) and top-1: the next-token distribution over recorded replies against the full cache's"
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
    """Over the tokens that were heard."""
    weighed = [(turn.heard, found) for turn in turns if (found := value(turn)) is not None]
    tokens = sum(heard for heard, _ in weighed)
    return f"{sum(heard * found for heard, found in weighed) / tokens:.3f}" if tokens else "-"


def _kl(turn: ReplayedTurn) -> float | None:
    return turn.kl_mean


def _agreement(turn: ReplayedTurn) -> float | None:
    return turn.top1_agreement


def _tokens(turns: Sequence[ReplayedTurn]) -> int:
    """Tokens of all parts."""
    longest: dict[int, int] = {}
    for turn in turns:
        longest[turn.part] = max(turn.length, longest.get(turn.part, 0))
    return sum(longest.values())
