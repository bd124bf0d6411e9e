"""The benchmark of sparse prefill plants lines that are found, and compares like with like."""

import torch

from benchmarks.sparse_prefill.blocks import DenseAttention, Shape, plant_block
from benchmarks.sparse_prefill.fidelity import cut_turn, result_rows
from benchmarks.sparse_prefill.speed import Plan, measure
from evals.harness import load
from workers.prefill.attention import _attend_exactly
from workers.prefill.settings import Prefill


def test_planted_lines_are_found_at_their_density() -> None:
    shape = Shape(4, 2, 64)
    settings = Prefill(sparse="on", alpha=0.955)
    cpu = torch.device("cpu")
    plan = Plan(shape, (2048,), (128,), settings, 2, 0, cpu, torch.float32)
    rows = list(measure(plan))
    by_metric = {(row["condition"], row["metric"]): row["median"] for row in rows}
    for share, condition in ((0.1, "2048 rows, block 128, lines of 10%"),):
        assert share < by_metric[condition, "density"] < share + 0.12
        assert by_metric[condition, "cover, least of a head"] >= 0.955
        assert 0 < by_metric[condition, "largest error of an output"] < 0.5
    assert {row["n"] for row in rows if row["metric"] == "dense / sparse"} == {2}


def test_the_dense_attention_is_exact() -> None:
    rows = plant_block(
        Shape(6, 2, 32), 300, 64, 0.1, 0, device=torch.device("cpu"), dtype=torch.float32
    )
    heads = [_attend_exactly(rows.heads(head, head + 1)) for head in range(2)]
    torch.testing.assert_close(DenseAttention(rows)(), torch.cat(heads))


def test_a_turn_is_cut_between_lines() -> None:
    tokenizer = load("reference").tokenizer
    lines = [f"line {number} of the text" for number in range(40)]
    user, reply = cut_turn(lines, tokenizer, 60, 40)
    said, replied = str(user["content"]).split("\n"), str(reply["content"]).split("\n")
    assert lines[: len(said) + len(replied)] == [*said, *replied]
    assert 40 < len(tokenizer.encode("\n".join(said))) <= 60
    assert 20 < len(tokenizer.encode("\n".join(replied))) <= 40 + 9  # what the message left


def test_rows_are_means_by_alpha() -> None:
    record = {"kl": 0.1, "top1": 0.9, "density": 0.5, "cover": 0.99, "least cover": 0.9, "heard": 7}
    records = [{"alpha": alpha, **record} for alpha in (0.98, 0.99, 0.99)]
    rows = list(result_rows(records, (0.98, 0.99), 0))
    assert [row["method"] for row in rows[::5]] == ["full, sparse 0.98", "full, sparse 0.99"]
    assert [row["n"] for row in rows[::5]] == [1, 2]
    assert [row["tokens_heard"] for row in rows[::5]] == [7, 14]
    assert rows[0]["mean"] == 0.1
