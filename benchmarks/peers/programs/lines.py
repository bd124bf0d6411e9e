"""The protocol of the programs: a request a line on standard input, a token a line in answer.

The first line of output says that the program is ready, with the versions of its libraries. A
request is JSON: `prompt`, all token ids of the session so far; `last`, where its newest message
begins; `max_tokens`, 0 to append only. The answer is a line for each token when it is there, then
`end`. The end-of-turn token ends an answer and is not a part of it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True)
class Request:
    """A request for up to `max_tokens` greedy tokens behind `prompt`."""

    prompt: list[int]
    last: int
    max_tokens: int


def serve(answer: Callable[[Request], Iterator[int]], libraries: tuple[str, ...]) -> None:
    """Answer requests until the input ends."""
    print(json.dumps({name: version(name) for name in libraries}), flush=True)
    for line in sys.stdin:
        for token in answer(Request(**json.loads(line))):
            print(token, flush=True)
        print("end", flush=True)


def common_prefix(held: list[int], wanted: list[int]) -> int:
    """Length of the common prefix, less than `wanted`: a last token has to be computed again."""
    same = 0
    while same < min(len(held), len(wanted) - 1) and held[same] == wanted[same]:
        same += 1
    return same
