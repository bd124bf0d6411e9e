"""Progress of the demo's runs."""

from io import StringIO

from rich.console import Console

from kvrecall_server.demo.progress import show_runs


def show(total: int, *, terminal: bool) -> str:
    """What is shown of a run of so many steps."""
    output = StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with show_runs(console) as begin:
        advance = begin("a run", total)
        for _ in range(total):
            advance(1)
    return output.getvalue()


def test_without_a_terminal_a_run_says_that_it_begins_and_each_quarter() -> None:
    lines = show(10, terminal=False).splitlines()
    assert lines[0] == "a run: begins"
    assert [line.partition(",")[0] for line in lines[1:]] == [
        f"a run: {done} of 10" for done in (3, 5, 8, 10)
    ]


def test_a_run_of_few_steps_has_a_line_for_each() -> None:
    assert len(show(1, terminal=False).splitlines()) == 2
    assert len(show(3, terminal=False).splitlines()) == 4


def test_a_terminal_has_a_bar() -> None:
    shown = show(10, terminal=True)
    assert "10/10" in shown
    assert "begins" not in shown
