"""Several answers to one request of OpenAI's own client, against a real server and a real worker."""

from typing import Any

from openai import OpenAI

Json = dict[str, Any]
SETTINGS: Json = {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
CHOICES = 3
PAGE = 64
TOKENS = 12


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    """Send a whole conversation; returns the raw response, with headers."""
    return client.chat.completions.with_raw_response.create(
        model=client.models.list().data[0].id,
        messages=messages,
        max_tokens=TOKENS,
        extra_body={"kvrecall": SETTINGS},
        **options,
    )


def texts_of(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def test_sampled_choices_differ_and_greedy_ones_are_the_only_answer(
    openai: OpenAI, say: Any
) -> None:
    opening = [say.user(say.chatter(200, 14))]
    single = ask(openai, opening, temperature=0).parse()
    greedy = ask(openai, opening, temperature=0, n=CHOICES).parse()
    assert texts_of(greedy) == texts_of(single) * CHOICES
    assert greedy.usage.prompt_tokens == single.usage.prompt_tokens
    assert greedy.usage.completion_tokens == CHOICES * TOKENS
    sampled = ask(openai, opening, temperature=1, n=CHOICES).parse()
    assert len(set(texts_of(sampled))) == CHOICES
    first = ask(openai, opening, temperature=1).parse()
    assert texts_of(first) == texts_of(sampled)[:1], "the first has the request's own seed"


def test_any_choice_can_be_gone_on_with_and_none_computes_again_what_was_said(
    openai: OpenAI, server: Any, say: Any
) -> None:
    messages: list[Any] = [say.user(say.chatter(201, 40))]
    held = 0
    for turn in range(2):
        response = ask(openai, messages, temperature=1, n=CHOICES)
        answer = response.parse()
        assert response.headers["kvrecall-match"] == ("forked" if turn else "built")
        assert answer.usage.prompt_tokens_details.cached_tokens == held - held % PAGE
        messages += [answer.choices[turn + 1].message, say.user(say.chatter(202 + turn, 3))]
        held = answer.usage.prompt_tokens + TOKENS - 1
    before = server.metric("kvrecall_worker_prefilled_tokens_total")
    last = ask(openai, messages, temperature=0)
    assert last.headers["kvrecall-match"] == "continued"
    usage = last.parse().usage
    assert usage.prompt_tokens_details.cached_tokens == held - held % PAGE
    computed = server.metric("kvrecall_worker_prefilled_tokens_total") - before
    assert computed == usage.prompt_tokens - (held - held % PAGE)


def test_streamed_choices_are_those_of_a_whole_answer(openai: OpenAI, say: Any) -> None:
    opening: list[Any] = [say.user(say.chatter(205, 14))]
    whole = ask(openai, opening, temperature=1, n=CHOICES).parse()
    stream = openai.chat.completions.create(
        model=openai.models.list().data[0].id,
        messages=opening,
        temperature=1,
        max_tokens=TOKENS,
        n=CHOICES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kvrecall": SETTINGS},
    )
    texts = [""] * CHOICES
    chunks: list[Any] = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [text.strip() for text in texts] == texts_of(whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_client_that_leaves_in_the_middle_leaves_no_session(
    openai: OpenAI, server: Any, client: Any, say: Any
) -> None:
    before = {each.id for each in client.list_sessions(limit=100).sessions}
    stream = openai.chat.completions.create(
        model=openai.models.list().data[0].id,
        messages=[say.user(say.chatter(206, 14))],
        max_tokens=1000,
        n=CHOICES,
        stream=True,
        extra_body={"kvrecall": SETTINGS},
    )
    next(iter(stream))
    stream.close()

    def is_gone() -> bool:
        return {each.id for each in client.list_sessions(limit=100).sessions} <= before

    say.until(is_gone, "the branches are deleted")
