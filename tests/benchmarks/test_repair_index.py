"""The benchmark of repairs through the index compares what they choose with an exact scan."""

from pathlib import Path

import pytest
import torch

from benchmarks.repair_index.__main__ import main
from benchmarks.repair_index.subjects import made_up_session, reference_sessions, search
from kvrecall.reporting.results import read_results
from workers.retrieval.settings import Retrieval


def test_the_arms_scan_the_same_rows() -> None:
    session = made_up_session(1500, seed=0)
    assert session.length == 1500
    exact = session.exact(session.signals[0])
    found = search(session.rows(Retrieval(index="exact")), session.signals[0], 1500)
    assert torch.allclose(found.scores, exact.scores, atol=1e-6)
    assert session.choose(found, 64) == session.choose(exact, 64)
    assert len(session.choose(exact, 64)) == 64


def test_signals_of_the_model_are_what_comes_next() -> None:
    (session,) = reference_sessions(600, [1])
    assert session.length == 600
    assert len(session.signals) == 16
    assert {signal.tokens for signal in session.signals} == {16}
    # The first rows of a session are sinks: a sign that queries and keys belong together.
    assert float(session.exact(session.signals[0]).scores[:4].mean()) > 0.02


def test_the_script_writes_a_result_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "repair-index.json"
    given = ["made-up", "--rows", "700", "1400", "--scans", "0.5", "--found", "8"]
    monkeypatch.setattr(
        "sys.argv", ["benchmarks/repair_index/__main__.py", *given, "--out", str(out)]
    )
    main()
    written = read_results(out)
    assert written.suite == "repair-index"
    methods = {row["method"] for row in written.results}
    assert methods == {"exact", "index, 8 rows a query", "tree, scan 0.5"}
    metrics = {row["metric"] for row in written.results if "metric" in row}
    assert metrics == {"scan", "searched share", "building of the index", "exponent of growth"}
    overlaps = [row for row in written.results if "overlap" in row["condition"]]
    assert {(row["n"], row["promoted"]) for row in overlaps} == {(5, 64), (5, 512)}
