"""Progress on a terminal and elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from tqdm import auto

from kvrecall_server.app import progress
from kvrecall_server.app.logs import set_up_logs
from kvrecall_server.app.progress import show_progress


def test_elsewhere_a_line_comes_at_once_and_others_while_it_lasts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[..., None],
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    set_up_logs("console")
    shown = ""

    def is_counted() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return "done=3" in shown and "total=7" in shown

    with show_progress("reading pages") as report:
        assert capsys.readouterr().err.count("reading pages") >= 1
        report(3, 7)
        until(is_counted)
    assert "\x1b" not in shown


def test_on_a_terminal_the_bars_of_libraries_are_shown_with_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(auto, "tqdm", auto.tqdm)
    with show_progress("loading it") as report:
        report(1, 2)
        for _ in auto.tqdm(range(3), desc="Loading weights:", mininterval=0):
            pass
        bar: Any = auto.tqdm(total=2, desc="left open")
        bar.close()
    shown = capsys.readouterr().err
    assert "loading it" in shown
    assert "it/s" not in shown, "a bar of tqdm's own"


def test_colours_follow_the_terminal_and_no_color(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables, coloured in (
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ):
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        set_up_logs("console")
        structlog.get_logger("kvrecall.process").info("a line")
        assert ("\x1b" in capsys.readouterr().err) == coloured, variables
