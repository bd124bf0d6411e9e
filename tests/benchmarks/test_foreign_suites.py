"""llama.cpp's cases: rows of the result file, and the shim under which they run."""

import importlib
from typing import Any

import pytest

from benchmarks.foreign_suites.benchmark import read_case
from benchmarks.foreign_suites.reasons import REASONS


def test_a_case_that_fails_has_the_reason_that_is_known() -> None:
    case = {"classname": "unit.test_tokenize", "name": "test_tokenize_with_bos"}
    assert read_case(case, []) == {
        "suite": "tokenize",
        "case": "test_tokenize_with_bos",
        "outcome": "passed",
    }
    failed = read_case(case, ["failure"])
    assert (failed["outcome"], failed["reason"]) == (
        "failure",
        REASONS["tokenize::test_tokenize_with_bos"],
    )
    parametrized = {"classname": "unit.test_chat_completion", "name": "test_chat_completion[a-b]"}
    assert read_case(parametrized, ["failure"])["reason"] != "not known"
    assert read_case({**case, "name": "test_new"}, ["failure"])["reason"] == "not known"


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        ("/chat/completions", {}, {"model": "tinyllama-2", "max_tokens": 64}),
        ("/v1/completions", {"max_tokens": 3}, {"model": "tinyllama-2", "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"model": "test"}, {"model": "test"}),
        ("/tokenize", {"content": "a"}, {"content": "a"}),
    ],
)
def test_the_shim_does_what_llama_cpp_does_by_itself(
    monkeypatch: pytest.MonkeyPatch, path: str, body: Any, sent: Any
) -> None:
    requests = pytest.importorskip("requests")
    received: list[tuple[str, Any]] = []

    def receive(session: Any, method: str, url: str, **options: Any) -> None:
        received.append((url, options["json"]))

    monkeypatch.setattr(requests.Session, "request", receive)
    shim = importlib.reload(importlib.import_module("benchmarks.foreign_suites.llama_cpp_shim"))
    shim.pytest_configure()
    requests.Session().request("POST", f"http://a{path}", json=body)
    ((url, found),) = received
    assert found == sent
    assert url == f"http://a/v1{path}" if path == "/chat/completions" else f"http://a{path}"
