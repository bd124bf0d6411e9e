"""The page on methods: its table agrees with the registry, and its example is a method."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvrecall.domain.settings.methods import METHOD_SETTINGS
from workers import methods
from workers.errors import BadSettings
from workers.methods import METHODS, Method
from workers.primitives import scoring, selection

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"


@pytest.fixture(scope="module")
def page() -> str:
    """The page's text."""
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture
def value_aware(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """The page's example, in a file and in the registry."""
    example = re.search(r"^`workers/methods/(\w+)\.py`:\n\n```python\n(.*?)```", page, re.M | re.S)
    assert example is not None
    file_name, code = example.groups()
    path = tmp_path / f"{file_name}.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"workers.methods.{file_name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (line,) = re.findall(r"^    (\w+),$", page, re.M)
    method: type[Method] = getattr(module, line)
    monkeypatch.setattr(methods, "METHODS", MappingProxyType({**METHODS, method.name: method}))
    return method


def test_every_method_is_in_the_table_with_its_settings_and_layer_budgets(page: str) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line[:3] == "| `"
    ]
    assert [row[0].strip("`") for row in rows] == list(METHODS)
    for name, _, _, settings, budgets, source in rows:
        method = METHODS[name.strip("`")]
        known = fields(METHOD_SETTINGS[method.name])
        shown = re.findall(r"`(\w+)`(?: = ([^,]+))?", settings)
        assert [setting for setting, _ in shown] == [field.name for field in known]
        for (setting, default), field in zip(shown, known, strict=True):
            assert default == ("" if setting == "prompt" else json.dumps(field.default))
        assert budgets == (method.layer_budgets if method.evicts else "")
        assert bool(source) == ("Source:" in (method.__doc__ or ""))


def test_the_page_names_no_function_that_does_not_exist(page: str) -> None:
    for name in ("attention_scores", "top_per_head", "top_over_heads", "whole_chunks"):
        assert f"`{name}`" in page
        assert hasattr(scoring, name) or hasattr(selection, name)


def test_the_pages_example_is_short_listed_and_its_settings_are_checked(
    value_aware: Callable[..., Method], page: str
) -> None:
    example = re.search(r"```python\n(.*?)```", page, re.S)
    assert example is not None
    code = example.group(1)
    assert len(code.splitlines()) < 50
    assert methods.describe("value_aware").summary.startswith("Attention of the turn's last")
    assert methods.build("value_aware", '{"window": 8}') == value_aware(window=8)
    with pytest.raises(BadSettings, match="window"):
        methods.build("value_aware", '{"window": 0}')


def test_the_pages_example_keeps_a_conversation_within_its_budget(
    value_aware: type[Method], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("llama", slots=1, max_budget=64, block_tokens=32)
    worker.open(method="value_aware", method_settings='{"window": 8}', budget=64)
    worker.turn("s", words(120), max_tokens=8)
    done = worker.turn("s", words(120, seed=1), max_tokens=8)
    memory = worker.memory()
    assert max(memory.active_rows) <= 64 < memory.length
    assert all(
        peak <= bound for peak, bound in zip(memory.peak_rows, memory.bound_rows, strict=True)
    )
    assert done.output_tokens > 0
    assert isinstance(worker.engine.session("s").config.method, value_aware)
    worker.check()


def test_the_pages_example_selects_other_rows_than_attention_alone(
    value_aware: type[Method], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("llama", slots=2, max_budget=64, block_tokens=32)
    worker.open("weighed", method="value_aware", method_settings='{"window": 8}', budget=64)
    worker.open("plain", method="snapkv", method_settings='{"window": 8, "pool": 1}', budget=64)
    for name in ("weighed", "plain"):
        worker.turn(name, words(200), max_tokens=1)
    kept = [
        worker.engine.snapshot(worker.engine.session(name)).selection
        for name in ("weighed", "plain")
    ]
    assert kept[0] != kept[1]
