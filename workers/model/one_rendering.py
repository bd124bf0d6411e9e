"""The renderings of one turn, as one: within their time, and on one day."""

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from kvrecall.sandbox.deadline import DeadlinePassed, limit_seconds
from workers.errors import BadMessages

_T = TypeVar("_T")


def render_together(render: Callable[[], _T], seconds: float) -> _T:
    """Run the renderings of one turn, which are compared with each other.

    Raises BadMessages where the template refuses the messages, or takes over `seconds` for them.
    """
    try:
        with limit_seconds(seconds):
            return _render_on_one_day(render)
    except DeadlinePassed as error:
        raise BadMessages(
            f"the chat template takes over {seconds:g} s for these messages"
        ) from error


def _render_on_one_day(render: Callable[[], _T]) -> _T:
    """Run renderings, again where the day has ended meanwhile: many templates insert the date."""
    today = datetime.now().date()
    try:
        rendered = render()
    except BadMessages:
        if datetime.now().date() == today:
            raise
    else:
        if datetime.now().date() == today:
            return rendered
    return render()
