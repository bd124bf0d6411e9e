"""The front door's benchmark at a small size, and the bound on the memory of unfinished bodies."""

from pathlib import Path

from benchmarks.front_door import benchmark as front_door
from benchmarks.front_door.benchmark import (
    ECHO,
    Plan,
    memory_row,
    read_rows,
    served,
    slow_rows,
    turn_rows,
)
from gateway.http.settings import GatewaySettings

PLAN = Plan(seed=0, seconds=0.3, rounds=1, turns=2)
# What the server and the kernel read ahead of each connection, twice what was measured.
CONNECTION_BYTES = 600_000


async def test_a_small_run_has_every_row_and_bounded_memory(tmp_path: Path) -> None:
    with served(ECHO, "echo", tmp_path) as echo, served("gateway", "stub", tmp_path) as gateway:
        reads = await read_rows([echo, gateway], PLAN)
        turns = await turn_rows([gateway], tmp_path, PLAN)
        slow = await slow_rows(gateway, PLAN)
        memory = await memory_row(gateway)
    assert len(reads) == 2 * len(front_door.CONNECTIONS)
    assert [row["condition"] for row in reads if "ratio" in row] == [
        f"{connections} connections: gateway" for connections in front_door.CONNECTIONS
    ]
    assert len(turns) == len(front_door.TURN_METRICS)
    assert [row["ratio_to"] for row in slow if "ratio" in row] == ["alone"]
    limit = GatewaySettings().max_body_buffer_bytes
    assert memory["median"] < limit + front_door.BAD_CONNECTIONS * CONNECTION_BYTES
