"""The tables of the documentation, from result rows."""

from benchmarks.peers.agent import rows as kinds
from benchmarks.peers.agent.tables import build_tables
from kvrecall_server.reporting.results import Row

ROWS: list[Row] = [
    {
        "condition": "ours",
        "metric": kinds.FIRST,
        "part": "before the restart",
        "median": 0.5,
        "p95": 1,
    },
    {"condition": "ours", "metric": kinds.RIGHT, "part": "after the restart", "mean": 0.75, "n": 4},
    {"condition": "ours", "metric": kinds.RESUMED, "turn": 2, "median": 0.3, "tokens": 3600},
    {"condition": "ours", "metric": kinds.RESUMED, "turn": 4, "median": 0.4, "tokens": 7200},
    {
        "condition": "slow",
        "metric": kinds.RESUMED,
        "turn": 4,
        "median": 8.0,
        "tokens": 7300,
        "ratio": 20.0,
    },
    {"condition": "ours", "metric": kinds.PEAK, "part": "after the restart", "median": 1 << 29},
    {"condition": "other", "metric": kinds.NOT_RUN, "reason": "npm is not installed"},
]


def test_each_figure_is_in_its_peers_line_and_column() -> None:
    first, second, missing = build_tables(ROWS).split("\n\n")
    assert first.splitlines()[2] == "| ours | 0.50 (1.00) |  |  |  |  |  | 3 of 4 |"
    ours, slow = second.splitlines()[2:]
    assert ours == "| ours | 0.30 | 0.40 |  |  |  | 0.50 |"
    assert slow == "| slow |  | 8.00 (20.0 x) |  |  |  |  |"
    assert missing == "- other: npm is not installed"


def test_lengths_at_a_restart_are_those_of_all_peers() -> None:
    _, second, _ = build_tables(ROWS).split("\n\n")
    header = second.splitlines()[0]
    assert "3,600 tokens" in header
    assert "7,200 to 7,300 tokens" in header
