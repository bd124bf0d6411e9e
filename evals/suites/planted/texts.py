"""Conversations that facts are planted in: windows of real ones, or generated small talk."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from evals.errors import BadDataFile
from evals.harness import Message
from evals.suites.locomo.data import list_files, read_conversation
from evals.suites.planted.facts import Fact, Split

CountTokens = Callable[[Sequence[Message]], int]

# Part of a text that facts are planted in: what is later may still be in the recent window.
_PLANTED_FROM = 0.05
_PLANTED_TO = 0.75

_TOPICS = {
    "the garden": ("tomatoes", "roses", "a pear tree", "the compost", "an old fence", "herbs"),
    "the trip": ("the ferry", "a small hotel", "the museum", "the night train", "a market", "maps"),
    "the kitchen": ("bread", "a lentil soup", "the oven", "plum cake", "sharp knives", "coffee"),
    "the choir": ("the concert", "a new song", "the rehearsal", "the old hall", "sheet music"),
    "the dog": ("the vet", "long walks", "the blue ball", "muddy paws", "a new leash", "treats"),
    "the office": ("the report", "a broken printer", "the new desk", "meetings", "a long lunch"),
}
_OPENERS = (
    "I spent the whole morning with {thing}, and {topic} took longer than I had thought.",
    "Did I tell you about {thing}? It is all I think of when it comes to {topic}.",
    "My neighbor asked about {topic} again, so I showed her {thing}.",
    "We talked about {topic} for an hour, and mostly about {thing}.",
    "Honestly, {thing} was the best part of {topic} this week.",
)
_REPLIES = (
    "That sounds lovely. How did it go with {thing} in the end?",
    "I see. With {topic} I would always begin with {thing}.",
    "Good to hear! Then {topic} is going well, and {thing} can wait until Sunday.",
    "Oh, that reminds me of last year, when {thing} kept us busy for days.",
    "Take your time with {thing}. There is no hurry at all.",
)


def build_text(
    data: str, split: Split, seed: int, tokens: int, count_tokens: CountTokens
) -> list[Message]:
    """A conversation of about `tokens` tokens that begins with the user.

    From the files in `data`, LoCoMo's: those at even places for "tuning", the others for
    "held_out". Without `data` it is generated. Raises BadDataFile.
    """
    rng = random.Random(f"planted:{split}:{seed}")
    source = _window(Path(data), split, seed, rng) if data else _small_talk(rng)
    messages: list[Message] = []
    for message in source:
        messages.append(message)
        if count_tokens(messages) >= tokens:
            break
    return messages


def plant(messages: Sequence[Message], facts: Sequence[Fact], seed: int) -> list[Message]:
    """The conversation with each fact's statement at the end of a message of the user."""
    rng = random.Random(f"planted:places:{seed}")
    first = int(len(messages) * _PLANTED_FROM)
    last = max(int(len(messages) * _PLANTED_TO), first + 1)
    places = [i for i in range(first, last) if messages[i]["role"] == "user"]
    if len(places) < len(facts):
        raise BadDataFile(f"a text of {len(messages)} messages has no room for {len(facts)} facts")
    planted = list(messages)
    for index, fact in zip(rng.sample(places, len(facts)), facts, strict=True):
        content = f"{planted[index]['content']} {fact.statement}"
        planted[index] = {**planted[index], "content": content}
    return planted


def _window(data: Path, split: Split, seed: int, rng: random.Random) -> Iterator[Message]:
    """Messages from a random one of the first half on."""
    files = list_files(data)[0 if split == "tuning" else 1 :: 2]
    if not files:
        raise BadDataFile(f"{data} needs two files at least: the texts of the two splits differ")
    spoken = read_conversation(files[seed % len(files)]).spoken
    users = [i for i in range(len(spoken) // 2) if spoken[i].role == "user"]
    start = rng.choice(users)
    for message in spoken[start:]:
        yield {"role": message.role, "content": message.content}


def _small_talk(rng: random.Random) -> Iterator[Message]:
    for number in count():
        topic = rng.choice(sorted(_TOPICS))
        things = rng.sample(_TOPICS[topic], 2)
        templates = _REPLIES if number % 2 else _OPENERS
        content = " ".join(
            template.format(thing=thing, topic=topic)
            for template, thing in zip(rng.sample(templates, 2), things, strict=True)
        )
        yield {"role": "assistant" if number % 2 else "user", "content": content}
