"""Result rows as two tables in Markdown: turns before and after the restart, and the restart."""

from collections.abc import Callable, Sequence

from benchmarks.peers.agent import rows as kinds
from kvrecall_server.reporting.results import Row

_BEFORE = "before the restart"
_AFTER = "after the restart"
_GIB = 1 << 30


def build_tables(rows: Sequence[Row]) -> str:
    """The tables, with a line for each peer; a peer that did not run has its reason below."""
    peers = list(dict.fromkeys(row["condition"] for row in rows if row["metric"] != kinds.NOT_RUN))
    turns = [row["turn"] for row in rows if row["metric"] == kinds.RESUMED]
    middle, end = (min(turns), max(turns)) if turns else (0, 0)
    first = _table(
        rows,
        peers,
        {
            "first token, s: median (p95)": (kinds.FIRST, _BEFORE, _with_p95),
            "after the restart": (kinds.FIRST, _AFTER, _with_p95),
            "last turn": (kinds.LAST, None, _seconds),
            "decoded per second": (kinds.DECODE, _BEFORE, _speed),
            "after the restart ": (kinds.DECODE, _AFTER, _speed),
            "right answers": (kinds.RIGHT, _BEFORE, _share),
            "after the restart  ": (kinds.RIGHT, _AFTER, _share),
        },
    )
    second = _table(
        rows,
        peers,
        {
            f"first token of the resumed session, s, {_length(rows, middle)}": (
                kinds.RESUMED,
                middle,
                _with_ratio,
            ),
            _length(rows, end): (kinds.RESUMED, end, _with_ratio),
            "start until ready, s": (kinds.READY, end, _seconds),
            "state copied behind each turn, s": (kinds.COPY, _AFTER, _seconds),
            "peak memory, GiB": (kinds.PEAK, _BEFORE, _gib),
            "after the restart": (kinds.PEAK, _AFTER, _gib),
        },
    )
    missing = [f"- {row['condition']}: {row['reason']}" for row in rows if "reason" in row]
    return "\n\n".join([first, second, *(["\n".join(missing)] if missing else [])])


def _table(
    rows: Sequence[Row],
    peers: Sequence[str],
    columns: dict[str, tuple[str, str | int | None, Callable[[Row], str]]],
) -> str:
    """A table with a column for each kind of row, by metric and part or turn."""
    found = {
        (row["condition"], row["metric"], row.get("part", row.get("turn"))): row for row in rows
    }
    lines = [["peer", *(name.strip() for name in columns)], ["---"] * (len(columns) + 1)]
    for peer in peers:
        cells = [peer]
        for metric, place, text in columns.values():
            row = found.get((peer, metric, place))
            cells.append("" if row is None else text(row))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _length(rows: Sequence[Row], turn: int) -> str:
    """Length of the session at a restart: the shortest and the longest of all peers."""
    lengths = [
        row["tokens"] for row in rows if row["metric"] == kinds.RESUMED and row["turn"] == turn
    ]
    if not lengths:
        return "no restart"
    low, high = min(lengths), max(lengths)
    return f"{low:,} tokens" if low == high else f"{low:,} to {high:,} tokens"


def _with_p95(row: Row) -> str:
    return f"{row['median']:.2f} ({row['p95']:.2f})"


def _seconds(row: Row) -> str:
    return f"{row['median']:.2f}"


def _with_ratio(row: Row) -> str:
    """Seconds, with the ratio to the baseline where there is one."""
    ratio = f" ({row['ratio']:.1f} x)" if "ratio" in row else ""
    return f"{row['median']:.2f}{ratio}"


def _speed(row: Row) -> str:
    return f"{row['median']:.1f}"


def _gib(row: Row) -> str:
    return f"{row['median'] / _GIB:.2f}"


def _share(row: Row) -> str:
    return f"{round(row['mean'] * row['n'])} of {row['n']}"
