"""A prompt is rendered beside the scheduler's thread."""

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from workers.errors import BadMessages
from workers.model.tokenizer import ChatTokenizer, Segment


def test_other_sessions_run_while_a_prompt_is_rendered(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    for name in ("slow", "other"):
        worker.open(name)
    begun = Event()
    released = Event()
    prompt = ChatTokenizer.prompt

    def wait_for_the_slow(
        self: ChatTokenizer, recent: Any, new: Any, tools: Any, generate: bool, **options: Any
    ) -> list[Segment]:
        if new[0]["content"] == "slow":
            begun.set()
            assert released.wait(300)
        return prompt(self, recent, new, tools, generate, **options)

    monkeypatch.setattr(ChatTokenizer, "prompt", wait_for_the_slow)
    slow = worker.submit("slow", "slow")
    assert begun.wait(300)
    assert worker.turn("other", words(20)).output_tokens
    assert not slow.done()
    released.set()
    assert slow.result(300).output_tokens
    worker.check()


def test_messages_that_the_template_refuses_change_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    worker.open()
    before = worker.turn("s", words(20)).memory

    def refuse(*_: object, **__: object) -> list[Segment]:
        raise BadMessages("the template refuses")

    with monkeypatch.context() as patch:
        patch.setattr(ChatTokenizer, "prompt", refuse)
        with pytest.raises(BadMessages):
            worker.turn("s", words(5))
        with pytest.raises(BadMessages):
            worker.repair("s", messages=[{"role": "user", "content": "a signal"}])
    assert worker.memory().length == before.length
    assert worker.turn("s", words(5)).output_tokens
