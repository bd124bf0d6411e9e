"""Small talk from recorded conversations: real text around the facts of a language."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from random import Random

from evals.errors import BadDataFile
from evals.languages.base import Language
from evals.recordings import read_all
from kvrecall_server.replay.recording import Message, Recording

Exchange = tuple[str, str]
# Characters of a message, at most: a tool's result may have any number.
_MESSAGE = 1200
# Characters of a sentence on a topic, before a statement or a question.
_LINE = 160
# Characters of a token, and tokens of the template around an exchange, for estimates.
_TOKEN = 4
_TEMPLATE_TOKENS = 12


def with_recorded_talk(language: Language, sources: Sequence[Path]) -> Language:
    """The language with small talk from recordings, of which each is a topic.

    Raises BadDataFile, BadReplayFile.
    """
    talk = {
        f"{number}: {recording.name}": exchanges
        for number, recording in enumerate(read_all(sources))
        if (exchanges := _exchanges(recording))
    }
    if not talk:
        raise BadDataFile("the recordings have no exchange of a user and an assistant")
    lengths = [len(user) + len(reply) for each in talk.values() for user, reply in each]
    return replace(
        language,
        name=f"{language.name}, recorded talk",
        topics=tuple(talk),
        chat_tokens=_TEMPLATE_TOKENS + sum(lengths) // len(lengths) // _TOKEN,
        fact_tokens=language.fact_tokens + _LINE // _TOKEN,
        small_talk=partial(_small_talk, talk),
        line=partial(_line, talk),
        lead=partial(_lead, talk),
    )


def _exchanges(recording: Recording) -> list[Exchange]:
    """Texts of the user's messages with the texts of all messages until the user's next one."""
    runs = [
        (is_user, _join(run))
        for is_user, run in groupby(
            (each for each in recording.messages if each["role"] != "system"),
            key=lambda message: message["role"] == "user",
        )
    ]
    return [
        (user, reply)
        for (is_user, user), (_, reply) in pairwise(runs)
        if is_user and user and reply
    ]


def _join(messages: Iterable[Message]) -> str:
    """Text of messages on one line, cut."""
    words = " ".join(str(message["content"]) for message in messages).split()
    return " ".join(words)[:_MESSAGE].strip()


def _small_talk(
    talk: Mapping[str, Sequence[Exchange]], rng: Random, topic: str, said: list[str]
) -> Exchange:
    """The exchange after the last one said of this recording, or a random one to begin with."""
    exchanges = talk[topic]
    numbers = {user: number for number, (user, _) in enumerate(exchanges)}
    last = next((numbers[user] for user in reversed(said) if user in numbers), None)
    chosen = rng.randrange(len(exchanges)) if last is None else (last + 1) % len(exchanges)
    said.append(exchanges[chosen][0])
    return exchanges[chosen]


def _line(talk: Mapping[str, Sequence[Exchange]], rng: Random, topic: str) -> str:
    return _cut(rng.choice(talk[topic])[0])


def _lead(talk: Mapping[str, Sequence[Exchange]], rng: Random, topic: str) -> Exchange:
    user, reply = rng.choice(talk[topic])
    return _cut(user), _cut(reply)


def _cut(text: str) -> str:
    """The beginning of a text, up to the end of a sentence or word."""
    if len(text) <= _LINE:
        return text
    begun = text[:_LINE]
    end = max(begun.rfind(mark) for mark in ".?!")
    return begun[: end + 1] if end > 0 else f"{begun.rpartition(' ')[0]}."
