"""The glossary: its order, and another name or a dash for every term."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"


def rows() -> list[list[str]]:
    """Cells of the table: term, meaning, name elsewhere."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_terms_are_in_alphabetical_order_each_once() -> None:
    terms = [row[0] for row in rows()]
    assert terms
    assert terms == sorted(set(terms), key=str.casefold)


def test_every_term_has_a_meaning_and_its_name_elsewhere() -> None:
    for row in rows():
        assert len(row) == 3, row
        assert all(row), row
