"""Conversations in the mixed language: what is asked was stated, in every form, latest value first."""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from reference.conversation import Conversation, Exchange
from reference.data import encode_conversation
from reference.forms import CLAUSES, MIXTURE, Place
from reference.mixed import generate_mixed
from reference.words import ATTRIBUTES, get_split

Facts = dict[tuple[str, str], str]

_ATTRIBUTE = "|".join(ATTRIBUTES)
_NAME = "[A-Z][a-z]+"
_VALUE = "[A-Z]+[0-9]+|[A-Z][a-z]+|[a-z]+ [a-z]+"
_STATEMENT = re.compile(
    rf"[Tt]he (?P<says>{_ATTRIBUTE}) list (?:now )?says (?P<items>{_NAME} .+?)[.?]"
    rf"|(?P<owner>{_NAME})'s (?P<is>{_ATTRIBUTE}) is (?:now )?(?P<is_value>{_VALUE})[.?]"
    rf"|[Tt]he (?P<of>{_ATTRIBUTE}) of (?P<named>{_NAME}) is (?:now )?(?P<of_value>{_VALUE})[.?]"
    rf"|(?P<person>{_NAME}) (?:now )?has (?P<has>{_ATTRIBUTE}) (?P<has_value>{_VALUE})[.?]"
)


def read_statements(text: str) -> list[tuple[str, str, str]]:
    """The facts of a message in their order: name, attribute and value."""
    facts = []
    for match in _STATEMENT.finditer(text):
        part = match.groupdict()
        if part["says"]:
            for item in part["items"].split(", "):
                name, value = item.split(" ", 1)
                facts.append((name, part["says"], value))
        elif part["is"]:
            facts.append((part["owner"], part["is"], part["is_value"]))
        elif part["of"]:
            facts.append((part["named"], part["of"], part["of_value"]))
        else:
            facts.append((part["person"], part["has"], part["has_value"]))
    return facts


def read_answer(exchange: Exchange) -> list[tuple[str, str, str]]:
    return read_statements(exchange.reply)


def asked(conversation: Conversation) -> list[Exchange]:
    return [each for each in conversation.exchanges if each.answer is not None]


def only(place: Place, n_tokens: int = 1500) -> list[Exchange]:
    """Questions of a language in which all stand at one place."""
    mixture = replace(MIXTURE, kinds={"tell": 1, "ask": 2}, places={place: 1})
    exchanges = asked(generate_mixed(3, n_tokens, mixture=mixture))
    assert exchanges
    return exchanges


seeds = given(seed=st.integers(0, 10**9))
few = settings(max_examples=15)


@seeds
@few
def test_a_conversation_is_a_function_of_its_seed_and_its_split(seed: int) -> None:
    assert generate_mixed(seed, 900) == generate_mixed(seed, 900)
    assert generate_mixed(seed, 900) != generate_mixed(seed, 900, split="train")
    assert generate_mixed(seed, 900).exchanges != generate_mixed(seed + 1, 900).exchanges


@seeds
@few
def test_names_and_values_stay_in_their_split(seed: int) -> None:
    for split in ("train", "held_out"):
        conversation = generate_mixed(seed, 1500, split=split)
        facts = [fact for each in conversation.exchanges for fact in read_statements(each.user)]
        assert {get_split(name) for name, _, _ in facts} == {split}
        assert {get_split(value) for _, _, value in facts} == {split}


@seeds
@settings(max_examples=40)
def test_every_answer_is_the_latest_statement_of_what_is_asked(seed: int) -> None:
    known: Facts = {}
    stated_in: dict[tuple[str, str], int] = {}
    changed: set[tuple[str, str]] = set()
    for index, exchange in enumerate(generate_mixed(seed, 2500).exchanges):
        for name, attribute, value in read_statements(exchange.user):
            if known.get((name, attribute), value) != value:
                changed.add((name, attribute))
            known[name, attribute] = value
            stated_in[name, attribute] = index
        if exchange.answer is None:
            continue
        answers = read_answer(exchange)
        for name, attribute, value in answers:
            assert known[name, attribute] == value
        if exchange.items:
            (attribute,) = {attribute for _, attribute, _ in answers}
            names = [name for name, _, _ in answers]
            if exchange.forms == ("list, named",):
                assert f" {', '.join(names)}" in exchange.user
            else:
                assert set(names) == {key[0] for key in known if key[1] == attribute}
            assert len(set(names)) == len(names)
        else:
            ((name, attribute, value),) = answers
            assert value == exchange.answer
            assert stated_in[name, attribute] == exchange.fact_exchange
            corrected = {"corrected", "corrected, unmarked"} & set(exchange.forms)
            assert bool(corrected) == ((name, attribute) in changed)


def test_a_question_stands_where_its_form_says() -> None:
    for exchange in only("alone"):
        assert not read_statements(exchange.user)
    for exchange in only("first"):
        ((name, attribute, _),) = read_answer(exchange)
        assert re.match(rf"[^.?]*{name}'s {attribute}|[^.?]*{attribute}[^.?]*{name}", exchange.user)
    for exchange in only("between"):
        ((name, _, _),) = read_answer(exchange)
        sentences = re.split(r"(?<=[.?]) ", exchange.user)
        assert any(name in sentence for sentence in sentences[1:-1])
    for exchange in only("last"):
        ((name, attribute, _),) = read_answer(exchange)
        last = re.split(r"(?<=[.?]) ", exchange.user)[-1]
        assert name in last
        assert attribute in last


def test_all_forms_of_the_mixture_occur_and_none_of_no_weight() -> None:
    counts = Counter(
        form
        for seed in range(16)
        for each in asked(generate_mixed(seed, 3000))
        for form in each.forms
    )
    expected = {f"question {place}" for place in get_args(Place)}
    expected |= {f"statement {clause}" for clause in CLAUSES}
    expected |= {"statement group", "corrected", "corrected, unmarked", "several facts a person"}
    expected |= {"list, named", "list, every", "tool", "tool, long result"}
    assert set(counts) == expected
    assert min(counts.values()) >= 5
    plain = replace(MIXTURE, clauses={"says": 1}, groups=0, facts_per_person={1: 1}, long_results=0)
    forms = {form for each in asked(generate_mixed(1, 3000, mixture=plain)) for form in each.forms}
    assert not forms & {"statement is", "statement group", "several facts a person"}
    assert "tool, long result" not in forms


def test_a_list_has_30_to_120_tokens_and_is_right_in_any_order(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    lists = [each for seed in range(40) for each in asked(generate_mixed(seed, 2000)) if each.items]
    lengths = [len(tokenizer.encode(each.reply, add_special_tokens=False)) for each in lists]
    assert len(lists) >= 20
    assert min(lengths) >= 30
    assert max(lengths) <= 120
    shuffled = "The desk list says " + ", ".join(reversed(lists[0].items)) + "."
    assert lists[0].is_answered_by(shuffled)
    assert not lists[0].is_answered_by(shuffled.rsplit(", ", 1)[0] + ".")
    assert not lists[0].is_answered_by("Noted.")


def test_the_cue_of_a_long_result_stands_anywhere_in_up_to_1000_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    mixture = replace(MIXTURE, kinds={"tell": 1, "tool": 2}, long_results=1)
    lengths = []
    depths = []
    for seed in range(12):
        for exchange in asked(generate_mixed(seed, 4000, mixture=mixture)):
            assert exchange.tool_result is not None
            ((name, _, _),) = read_answer(exchange)
            fields = json.loads(exchange.tool_result)
            assert [key for key, value in fields.items() if value == name] != []
            lengths.append(len(tokenizer.encode(exchange.tool_result, add_special_tokens=False)))
            depths.append(list(fields.values()).index(name) / (len(fields) - 1))
    assert 700 <= max(lengths) <= 1050
    assert {0.0, 0.5, 1.0} <= set(depths)


@pytest.mark.parametrize("seed", range(5))
def test_training_weights_the_answers_of_the_ids_that_the_template_renders(
    tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    conversation = generate_mixed(seed, 1500, split="train")
    tools: Any = conversation.tools or None
    text = tokenizer.apply_chat_template(conversation.messages(), tokenize=False, tools=tools)
    row = encode_conversation(conversation, tokenizer, limit=10**9)
    assert row.ids == tokenizer.encode(text, add_special_tokens=False)
    learned = [tokenizer.decode(row.ids[start:end]) for start, end, _, _ in row.answers]
    assert learned == [each.learned_text for each in asked(conversation)]
    for text, exchange in zip(learned, asked(conversation), strict=True):
        near = {"question alone", "question last"} & set(exchange.forms)
        assert text == (f" {exchange.answer}." if near else exchange.reply)
