"""Results of tools with a question in them: what a pause's repair is asked by."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count, cycle
from pathlib import Path

from evals.errors import BadDataFile
from evals.harness import Message
from evals.recordings import read_all
from evals.suites.planted.facts import Split

# A question may follow the end of a line, or a member of a JSON object.
_BREAK = re.compile(r"\n|, ")
_GOODS = ("garden hose", "oven tray", "choir folder", "dog leash", "office chair", "night lamp")
_STATES = ("packed", "on its way", "delivered", "returned", "delayed")


def build_result(
    sources: Sequence[str],
    split: Split,
    seed: int,
    tokens: int,
    question: str,
    count_tokens: Callable[[Sequence[Message]], int],
) -> Message:
    """A tool's result of about `tokens` tokens with the question at a random place in it.

    The text is real: of consecutive results in the recordings from a random one on, those at even
    places for "tuning", the others for "held_out". Without sources it is generated. Raises
    BadDataFile, BadReplayFile.
    """
    rng = random.Random(f"planted:result:{split}:{seed}:{tokens}")
    source = _recorded(tuple(sources), split, rng) if sources else _orders(rng)
    text = ""
    while count_tokens([_result(text)]) < tokens:
        text += f"{next(source)}\n"
    text = _cut(text, tokens, count_tokens)
    places = [found.end() for found in _BREAK.finditer(text)] or [len(text)]
    at = rng.choice(places)
    return _result(f"{text[:at].rstrip(' ')}\n{question}\n{text[at:]}".strip())


def _result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def _cut(text: str, tokens: int, count_tokens: Callable[[Sequence[Message]], int]) -> str:
    """The longest beginning of a text with at most `tokens` tokens, to a hundredth."""
    low, high = 0, len(text)
    while high - low > max(1, len(text) // 100):
        middle = (low + high) // 2
        if count_tokens([_result(text[:middle])]) <= tokens:
            low = middle
        else:
            high = middle
    return text[:low]


@cache
def _read_results(sources: tuple[str, ...], split: Split) -> tuple[str, ...]:
    """Distinct results of tools in the recordings of a split. Raises BadDataFile, BadReplayFile."""
    recordings = read_all([Path(source) for source in sources])
    of_split = recordings[0 if split == "tuning" else 1 :: 2]
    results = dict.fromkeys(
        str(message["content"]).strip()
        for recording in of_split
        for message in recording.messages
        if message["role"] == "tool"
    )
    results.pop("", None)
    if not results:
        raise BadDataFile(f"the recordings of {split} have no result of a tool")
    return tuple(results)


def _recorded(sources: tuple[str, ...], split: Split, rng: random.Random) -> Iterator[str]:
    results = _read_results(sources, split)
    start = rng.randrange(len(results))
    yield from cycle([*results[start:], *results[:start]])


def _orders(rng: random.Random) -> Iterator[str]:
    for number in count(1):
        yield (
            f'{{"order": {rng.randrange(10**6, 10**7)}, "line": {number}, '
            f'"item": "{rng.choice(_GOODS)}", "pieces": {rng.randrange(1, 9)}, '
            f'"state": "{rng.choice(_STATES)}"}}'
        )
