"""Why a token is active: the first reason that applies, from the session's state and its repairs."""

from typing import Any

import pytest

from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import RepairDetails, RepairRecord
from services.reading.memory_map import MapContext, explain, index_repairs

HELD, EVICTED, PROMOTED = (1, 1, 0, 1), (0, 0, 0, 0), (1, 2, 0, 0)


def build_context(episode: str = "", evicted_rows: int = 7) -> MapContext:
    """A session of 100 tokens, the last 20 of its last turn."""
    settings = SessionSettings(budget=64, repair_rows=8, method="snapkv")
    memory = MemoryReport(length=100, evicted_rows=evicted_rows)
    repairs = [
        RepairRecord(
            number, 3, 1.0, RepairReport(trigger, 1, 1, 2, 0.1), RepairDetails("", positions)
        )
        for number, trigger, positions in (
            (16, "tool_call", (40, 41)),
            (17, "tool_result", (41, 42)),
        )
    ]
    return MapContext(
        session=Session("s", 1, settings, 1.0, 1.0, 3, memory),
        state=pb.SessionState(length=100, pending=[5], episode=episode),
        sinks=4,
        recent=8,
        turns=(),
        turn_start=80,
        promoted_by=index_repairs(repairs),
    )


@pytest.mark.parametrize(
    ("position", "rows", "context", "reason", "detail"),
    [
        (100, EVICTED, {}, "pending", "sampled, and computed with the next turn"),
        (50, EVICTED, {}, "evicted", "evicted in all layers; its score was 0.013"),
        (3, HELD, {}, "sink", "one of the first 4 tokens, which are never evicted"),
        (4, HELD, {}, "kept", "kept by snapkv"),
        (92, HELD, {}, "recent", "one of the newest 8 tokens, which are never evicted"),
        (91, HELD, {}, "turn", "of the last turn, whose tokens are protected while it runs"),
        (41, PROMOTED, {}, "promoted", "brought back by repair 17 (tool_result)"),
        (40, PROMOTED, {}, "promoted", "brought back by repair 16 (tool_call)"),
        (60, PROMOTED, {}, "promoted", "brought back by a repair"),
        (41, HELD, {}, "kept", "kept by snapkv"),
        (50, HELD, {"episode": "e2"}, "episode", "kept for episode e2"),
        (
            50,
            HELD,
            {"evicted_rows": 0},
            "fits",
            "nothing was evicted: the session is within its budget",
        ),
    ],
)
def test_the_first_reason_that_applies_is_given(
    position: int, rows: Any, context: Any, reason: str, detail: str
) -> None:
    assert explain(build_context(**context), position, rows, 0.013) == (reason, detail)


def test_an_evicted_token_without_a_known_score_has_none_in_its_reason() -> None:
    assert explain(build_context(), 50, EVICTED, None) == ("evicted", "evicted in all layers")
