"""The glossary: its size, its order, and another name or a dash for every term."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"


def rows() -> list[list[str]]:
    """Cells of the table: term, meaning, name elsewhere."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_glossary_has_30_to_50_terms_in_alphabetical_order() -> None:
    terms = [row[0] for row in rows()]
    assert 30 <= len(terms) <= 50
    assert terms == sorted(set(terms), key=str.casefold)


def test_every_term_has_a_meaning_and_its_name_elsewhere() -> None:
    for row in rows():
        assert len(row) == 3, row
        assert all(row), row


def test_most_terms_name_a_paper_or_an_engine() -> None:
    known = re.compile(
        r"EpiCache|RepairKV|ChunkKV|IceCache|LoopServe|KIVI|SnapKV|H2O|PyramidKV|StreamingLLM|"
        r"vLLM|SGLang|LMCache|Mooncake|kvpress|llama\.cpp|nano-vllm|Redis|Raft"
    )
    named = [row[0] for row in rows() if known.search(row[2])]
    assert len(named) >= 0.9 * len(rows())
