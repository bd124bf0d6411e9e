"""The memory that a worker may use: of the machine, or of its container."""

from pathlib import Path

import psutil

from workers.engine.host.memory import measure_host_memory


def test_a_container_s_limit_counts_where_it_is_less(tmp_path: Path) -> None:
    limits = [tmp_path / name for name in ("max", "unlimited", "missing")]
    total = psutil.virtual_memory().total
    limits[0].write_text("1073741824\n")
    limits[1].write_text("max\n")
    assert measure_host_memory(limits) == 1 << 30
    assert measure_host_memory(limits[1:]) == total
    limits[0].write_text(f"{2 * total}\n")
    assert measure_host_memory(limits) == total
