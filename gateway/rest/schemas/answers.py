"""Options of answers that all APIs share: penalties, bias, choice of tools, form of the text.

`tool_choice` and `response_format` are read as chat completions write them, and as responses do,
which leave one level out.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from gateway.rest.schemas.base import JsonObject, Name
from gateway.rest.schemas.sessions import CreateSessionBody
from kvrecall.domain.answer.constraints import Constraint, ToolChoice
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Sampling
from services.conversations.continuation import Direction

Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^\d{1,7}$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=1024),
]
_MAX_TOOLS = 1024


class AnswerOptions(BaseModel):
    """Options of one answer beside the usual sampling parameters. Null is the same as absent."""

    frequency_penalty: Penalty | None = Field(
        default=None,
        description="Taken off a token's logit for each time this answer has it already.",
    )
    presence_penalty: Penalty | None = Field(
        default=None, description="Taken off the logit of each token that this answer has already."
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Divisor of the logit of each token that this answer has already; a factor if "
        "the logit is negative.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Least probability of a token to sample, as a share of the likeliest one's.",
    )
    logit_bias: LogitBias | None = Field(
        default=None, description="What is added to the logits of tokens, by id."
    )
    tool_choice: Literal["none", "auto", "required"] | JsonObject | None = Field(
        default=None,
        description='"auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.',
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: at most one call per answer."
    )

    def constrain(
        self, sampling: Sampling, form: JsonObject | None, field: str = "response_format"
    ) -> Sampling:
        """Return the sampling with these options, and the form of the answer's text.

        Raises InvalidRequest, with `field` for the form.
        """
        choice, tools = _read_choice(self.tool_choice)
        named = isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function"
        schema, strict = _read_form(form, field)
        bias = sorted((int(token), value) for token, value in (self.logit_bias or {}).items())
        return sampling.with_named(
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            min_p=self.min_p,
            logit_bias=tuple(bias),
            constraint=Constraint(
                schema, strict, choice, tools, self.parallel_tool_calls is False or named
            ),
        )


class DirectionBody(CreateSessionBody):
    """Settings of the session that a conversation begins, or where it goes on instead."""

    session: Name | None = Field(
        default=None,
        description="Session that holds all but the last messages; `none`: one of its own, which is "
        "deleted behind the answer.",
    )
    history: Literal["whole", "new"] | None = Field(
        default=None,
        description="`new`: the messages are those that follow what `session` holds.",
    )
    retain: Literal["none"] | None = Field(
        default=None,
        description="`none`: as `session`: `none`.",
    )

    @property
    def direction(self) -> Direction:
        """Where the conversation goes on. Raises InvalidRequest for what excludes each other."""
        alone = "none" in (self.session, self.retain)
        session = "" if self.session is None or self.session == "none" else self.session
        if self.history == "new" and not session:
            raise InvalidRequest("kvrecall.history", "new messages need a session to follow")
        # A salt is no setting here: a proxy may add it to every request, and it is compared.
        if session and self.model_fields_set - {"session", "history", "cache_salt"}:
            message = "a session keeps the settings that it has; leave the others out"
            raise InvalidRequest("kvrecall.session", message)
        return Direction(session, self.history == "new", alone)


def _read_choice(choice: str | JsonObject | None) -> tuple[ToolChoice, tuple[str, ...]]:
    """Read a choice of tools: whether to call, and the names of those that may be called."""
    if choice is None or isinstance(choice, str):
        return ToolChoice(choice or ToolChoice.AUTO), ()
    if choice.get("type") == "function":
        return ToolChoice.REQUIRED, (_read_name(choice),)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        if (
            mode in ("auto", "required")
            and isinstance(tools, list)
            and 0 < len(tools) <= _MAX_TOOLS
        ):
            return ToolChoice(mode), tuple(dict.fromkeys(map(_read_name, tools)))
    raise InvalidRequest("tool_choice", f"{json.dumps(choice)[:100]} is not a choice of tools")


def _read_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or tool.get("type", "function") != "function":
        message = f"{json.dumps(tool)[:100]} names no function"
        raise InvalidRequest("tool_choice", message)
    return name


def _read_form(form: JsonObject | None, field: str) -> tuple[str, bool]:
    """Read the form of a text: the JSON text of its schema, empty for free text, and if strict."""
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return "", False
    if kind == "json_object" and form.get("schema") is None:
        return json.dumps({"type": "object"}), False
    if kind not in ("json_object", "json_schema"):
        raise InvalidRequest(f"{field}.type", f"{kind!r} is none of text, json_object, json_schema")
    nested = "json_schema" in form
    described = form["json_schema"] if nested else form
    schema = described.get("schema", {}) if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        place = f"{field}.json_schema.schema" if nested else f"{field}.schema"
        raise InvalidRequest(place, "a schema is an object")
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        place = f"{field}.json_schema.strict" if nested else f"{field}.strict"
        raise InvalidRequest(place, "strict is true or false")
    return json.dumps(schema), strict is True
