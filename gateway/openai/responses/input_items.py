"""What led to a response, read back from the turn log of its session."""

import json
from collections.abc import Sequence
from typing import Any

from gateway.openai.responses.ids import ItemPlace
from gateway.openai.responses.items import read_turn
from gateway.openai.responses.objects import is_committed
from gateway.openai.responses.tools import Toolbox, place_tools
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.session import Turn
from services.catalog.responses import StoredResponse
from services.service import SessionService

Json = dict[str, Any]
_TURNS_PER_READ = 32


async def read_input_items(
    service: SessionService,
    response: StoredResponse,
    after: str | None,
    limit: int,
    newest_first: bool,
) -> list[Json]:
    """Return up to `limit` items that follow the item `after` in this order.

    They are all of the conversation up to the response, but for its instructions: it reads only the
    turns that the page is of. Raises InvalidRequest for an unknown `after`.
    """
    items: list[Json] = []
    body = json.loads(response.body)
    toolbox = place_tools(body["tools"])
    waiting = after is not None
    # The turn of a response that has not ended, or not well, is not in the log or is another's.
    last = response.turn - (not is_committed(body))
    turn = _get_first_turn(response, last, after, newest_first)
    while len(items) < limit and 1 <= turn <= last:
        first = max(1, turn - _TURNS_PER_READ + 1) if newest_first else turn
        count = turn - first + 1 if newest_first else _TURNS_PER_READ
        after_turn = max(0, first - 2)  # calls of the turn before tell the types of its outputs
        more = min(count, last - first + 1) + first - 1 - after_turn
        turns = await service.responses.get_turns(response, after_turn, more)
        found = _read(turns, first, response, toolbox)
        if newest_first:
            found.reverse()
        if waiting:
            ids = [item["id"] for item in found]
            if after not in ids:
                break
            found = found[ids.index(after) + 1 :]
            waiting = False
        items += found
        turn = first - 1 if newest_first else turn + _TURNS_PER_READ
    if waiting:
        raise InvalidRequest("after", f"there is no item {after!r}")
    return items[:limit]


def _get_first_turn(
    response: StoredResponse, last: int, after: str | None, newest_first: bool
) -> int:
    """Return the turn to begin at. Raises InvalidRequest."""
    if after is None:
        return last if newest_first else 1
    place = ItemPlace.parse(after)
    if place is None or place.name.session != response.session:
        raise InvalidRequest("after", f"there is no item {after!r}")
    return place.name.turn


def _read(
    turns: Sequence[Turn], first: int, response: StoredResponse, toolbox: Toolbox
) -> list[Json]:
    """Return the items of turns from number `first` on, without the response's own answer."""
    items: list[Json] = []
    for before, turn in zip([None, *turns], turns, strict=False):
        if turn.number >= first:
            hidden = response.hidden if turn.number == 1 else 0
            answered = turn.number < response.turn
            items += read_turn(turn, toolbox, before, hidden, answered)
    return items
