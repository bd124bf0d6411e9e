"""Generated conversations: deterministic, with consistent answers, split by names and values."""

import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.conversation import Conversation, generate
from reference.words import get_split


def stated_values(conversation: Conversation) -> set[str]:
    return {exchange.answer for exchange in conversation.exchanges if exchange.answer is not None}


def parse_name(reply: str) -> str:
    match = re.fullmatch(r"The \w+ list says (\w+) .+", reply)
    assert match is not None
    return match.group(1)


def asked_names(conversation: Conversation) -> set[str]:
    return {
        parse_name(exchange.reply)
        for exchange in conversation.exchanges
        if exchange.answer is not None
    }


@given(seed=st.integers(0, 10**9), n_tokens=st.integers(200, 3000))
@settings(max_examples=20, deadline=None)
def test_a_conversation_is_a_function_of_its_seed(seed: int, n_tokens: int) -> None:
    assert generate(seed, n_tokens) == generate(seed, n_tokens)


def test_another_seed_is_another_conversation() -> None:
    assert generate(1, 1000).exchanges != generate(2, 1000).exchanges


@given(seed=st.integers(0, 10**9))
@settings(max_examples=15, deadline=None)
def test_names_and_values_stay_in_their_split(seed: int) -> None:
    for split in ("train", "held_out"):
        conversation = generate(seed, 2000, split=split)
        assert {get_split(name) for name in asked_names(conversation)} == {split}
        assert {get_split(value) for value in stated_values(conversation)} == {split}


@given(seed=st.integers(0, 10**9))
@settings(max_examples=15, deadline=None)
def test_every_question_refers_to_the_latest_statement_of_its_fact(seed: int) -> None:
    conversation = generate(seed, 4000)
    for index, exchange in enumerate(conversation.exchanges):
        if exchange.fact_exchange is None:
            continue
        stated = conversation.exchanges[exchange.fact_exchange]
        assert exchange.fact_exchange < index
        assert stated.kind in ("fact", "correction")
        match = re.fullmatch(r"The (\w+) list says (\w+) .+", exchange.reply)
        assert match is not None
        attribute, name = match.groups()
        assert exchange.answer is not None
        assert all(word in stated.user for word in (name, attribute, exchange.answer))
        for between in conversation.exchanges[exchange.fact_exchange + 1 : index]:
            assert not (between.kind == "correction" and f"list now says {name} " in between.user)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=15, deadline=None)
def test_only_the_result_of_a_tool_exchange_has_the_name(seed: int) -> None:
    conversation = generate(seed, 3000)
    offered = {tool["function"]["name"] for tool in conversation.tools}
    for exchange in conversation.exchanges:
        if exchange.tool_call is None:
            continue
        assert exchange.tool_result is not None
        (name,) = json.loads(exchange.tool_result).values()
        assert exchange.tool_call.name in offered
        assert name not in exchange.user
        assert parse_name(exchange.reply) == name


def test_a_long_conversation_asks_over_a_hundred_times_at_all_ages() -> None:
    conversation = generate(7, 8300)
    asked = [exchange for exchange in conversation.exchanges if exchange.answer is not None]
    assert len(asked) > 100
    assert sum(exchange.kind == "tool" for exchange in asked) >= 20
    ages = [
        (index - exchange.fact_exchange) / len(conversation.exchanges)
        for index, exchange in enumerate(conversation.exchanges)
        if exchange.fact_exchange is not None
    ]
    for low in (0.0, 0.2, 0.4, 0.6):
        assert sum(low <= age < low + 0.2 for age in ages) > len(ages) / 10


@pytest.mark.parametrize("n_facts", [5, 40])
def test_the_number_of_facts_can_be_set(n_facts: int) -> None:
    conversation = generate(3, 4000, n_facts=n_facts)
    assert sum(exchange.kind == "fact" for exchange in conversation.exchanges) == n_facts


def test_a_reply_with_another_value_or_more_text_is_wrong() -> None:
    exchange = next(each for each in generate(3, 1000).exchanges if each.answer is not None)
    assert exchange.is_answered_by(exchange.reply)
    assert not exchange.is_answered_by(exchange.reply[:-2] + ".")
    assert not exchange.is_answered_by(exchange.reply + " Maybe.")
    assert not exchange.is_answered_by("Noted.")


def test_messages_are_openai_style() -> None:
    messages = generate(5, 1500).messages()
    assert messages[0]["role"] == "system"
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    results = [message for message in messages if message["role"] == "tool"]
    assert [call["id"] for call in calls] == [result["tool_call_id"] for result in results] != []
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


def test_the_plain_language_is_the_one_that_results_were_measured_on() -> None:
    messages = repr(generate(1000, 2048).messages())
    assert hashlib.sha256(messages.encode()).hexdigest().startswith("26ea4feb436e600f")
