"""Members of a request that set variables of the model's chat template: reasoning, its effort, arguments by name.

Templates have different names for the same thing. A wish is given under each name that the served
model's template reads. A wish without such a name is noted as ignored.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.conversation.ignored import IgnoredParts
from gateway.rest.schemas.base import JsonObject
from gateway.rest.schemas.template_arguments import TemplateArguments

# Variables by which templates turn reasoning on and off, and the one by which they set its effort.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"
_TYPES: Mapping[str, bool] = {"enabled": True, "adaptive": True, "disabled": False}
MAX_EFFORT = 64


@dataclass(frozen=True)
class Wish:
    """A wish of one member of a request for the chat template: values, by the variables that may take them.

    `without_effect`: parts of the member that no template takes.
    """

    field: str
    values: Mapping[str, Any]
    without_effect: tuple[str, ...] = ()


def wish_effort(field: str, effort: str, *, switches: bool = True) -> Wish:
    """Return the wish for an effort of reasoning; one that `switches` turns reasoning on or off as well."""
    return Wish(field, {**_switch(effort != _NO_EFFORT if switches else None), _EFFORT: effort})


def _switch(on: bool | None) -> Mapping[str, bool]:
    """Return the values that turn reasoning on or off; none for None."""
    return {} if on is None else dict.fromkeys(_SWITCHES, on)


class ThinkingBody(BaseModel):
    """Whether the model reasons, as Anthropic's API says it. How long it reasons is not bounded here."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str


class TemplateOptions(BaseModel):
    """Members that set variables of the model's chat template."""

    chat_template_kwargs: TemplateArguments | None = Field(
        default=None,
        description="Further arguments of the model's chat template, such as enable_thinking. Only a "
        "session with the same ones is continued.",
    )
    enable_thinking: bool | None = Field(
        default=None, description="Whether the model reasons, where its chat template reads that."
    )
    thinking: ThinkingBody | None = Field(
        default=None, description="The same, as Anthropic's API says it."
    )

    def find_wishes(self) -> Iterator[Wish]:
        """Yield the wishes of the members for the chat template; the later ones win."""
        if self.thinking is not None:
            parts = tuple(f"thinking.{name}" for name in self.thinking.model_extra or ())
            yield Wish("thinking", _switch(_TYPES.get(self.thinking.type)), parts)
        if self.enable_thinking is not None:
            yield Wish("enable_thinking", _switch(self.enable_thinking))

    def choose_arguments(
        self, given: JsonObject, variables: Container[str], ignored: IgnoredParts
    ) -> JsonObject:
        """Return the arguments of a chat template that reads these variables.

        Arguments that are `given` by name win. Wishes and names that the template does not read are noted.
        """
        chosen: JsonObject = {}
        for wish in self.find_wishes():
            read = {name: value for name, value in wish.values.items() if name in variables}
            for field in wish.without_effect if read else (wish.field,):
                ignored.note(field)
            chosen |= read
        for name in given:
            if name not in variables:
                ignored.note(f"chat_template_kwargs.{name}")
        return {**chosen, **given}
