"""Requests for an answer to a whole conversation: what all APIs of stateless clients have alike.

Members that are not listed are left out and named in a header, as clients add their own. `null` is
the same as absent. What would change the answer and cannot be honoured is refused with its name.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints

from gateway.conversation.ignored import IgnoredParts, Tolerance
from gateway.conversation.template_options import TemplateOptions
from gateway.rest.schemas.answers import DirectionBody
from gateway.rest.schemas.base import CacheSalt, Name, TopK
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.answer.constraints import ToolChoice
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest

# The id of a call as a client has it: some carry what others' servers need in it.
CallId = Annotated[str, StringConstraints(max_length=1 << 16)]
MAX_MESSAGES = 100_000
MAX_TOOLS = 1024
# A share of 0 leaves the likeliest token, as llama.cpp takes it.
_LEAST_TOP_P = 1e-6


class Wire(BaseModel):
    """A part of a request: unknown members are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class CheckedRequest(Wire):
    """A request whose unlisted members are kept to be checked by name."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    # Unlisted members that are not ignored, with their values that ask for nothing.
    honoured: ClassVar[Mapping[str, Sequence[object]]] = {}

    _ignored: IgnoredParts = PrivateAttr(default_factory=IgnoredParts)

    @property
    def ignored(self) -> IgnoredParts:
        """What of the request was left out or replaced, as far as it was read."""
        return self._ignored

    def tolerate(self, limits: ServiceLimits) -> Tolerance:
        """Return what becomes of parts that cannot be read here."""
        return Tolerance(limits.mends, self._ignored)

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        for name, honoured in self.honoured.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in honoured:
                message = f"{name} {json.dumps(value)[:100]} is not supported here; leave it out"
                raise InvalidRequest(name, message, openai_code="unsupported_parameter")


class ModelRequest(CheckedRequest):
    """A request to a model by its name."""

    model: Name


class ConversationBody(TemplateOptions, ModelRequest, ABC):
    """A request for an answer. The abstract members are what each API writes in its own way."""

    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: TopK = None
    kvrecall: DirectionBody = Field(
        default=DirectionBody(),
        description="Settings of the session that the conversation begins if none holds it; only "
        "one with the same settings is continued.",
    )
    cache_salt: CacheSalt | None = Field(
        default=None,
        description="As in vLLM: share rows and conversations only with requests of the same salt, such "
        "as a random string for each end user.",
    )

    @property
    @abstractmethod
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: the service's default."""

    @property
    @abstractmethod
    def stop_strings(self) -> Sequence[str]:
        """The strings that end the answer."""

    @property
    @abstractmethod
    def session_tools(self) -> list[ToolBody]:
        """The tools as a session has them. Raises InvalidRequest for those that cannot be."""

    @abstractmethod
    def constrain_answer(self, sampling: Sampling) -> Sampling:
        """Return the sampling with the choice of tools, the form of the text and further options.

        Raises InvalidRequest.
        """

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        if self.kvrecall.tools:
            raise InvalidRequest("kvrecall.tools", "name the tools in the member tools")
        if self.chat_template_kwargs and self.kvrecall.direction.session:
            message = "a session keeps the settings that it has; leave it out"
            raise InvalidRequest("chat_template_kwargs", message)

    @property
    def salt(self) -> str:
        """The salt of the request, by the member `kvrecall` or beside it; empty: none."""
        return self.kvrecall.cache_salt or self.cache_salt or ""

    @property
    def in_background(self) -> bool:
        """True if other work comes first: the tier `flex` of OpenAI's API."""
        return (self.model_extra or {}).get("service_tier") == "flex"

    def settings_to_domain(self, tenant: str, variables: Container[str]) -> CreateSession:
        """Convert to the settings of the session that the conversation would begin.

        `variables` of the chat template that may be set; none are where the request names its session.
        """
        own = self.kvrecall.chat_template_kwargs or {}
        given = {**(self.chat_template_kwargs or {}), **own}
        if self.kvrecall.direction.session:
            variables = ()
        arguments = self.choose_arguments(given, variables, self.ignored)
        body = self.kvrecall.model_copy(
            update={
                "tools": self.session_tools,
                "model": None,
                "chat_template_kwargs": arguments,
            }
        )
        return replace(body.to_domain(), tenant=tenant, cache_salt=self.salt)

    def turn_to_domain(self, limits: ServiceLimits, default: Sampling) -> TurnRequest:
        """Convert to a turn without messages, with what is not named from `default`.

        More output than allowed is cut, not refused.
        """
        wanted = self.wanted_tokens or default.max_tokens
        sampling = default.with_named(
            max_tokens=limits.cut_length(wanted),
            temperature=self.temperature,
            top_p=None if self.top_p is None else max(self.top_p, _LEAST_TOP_P),
            top_k=self.top_k,
            stop=tuple(self.stop_strings),
        )
        return TurnRequest(
            (), sampling=self.constrain_answer(sampling), background=self.in_background
        )


def begin_answer(turn: TurnRequest, message: Message, field: str) -> TurnRequest:
    """Return the turn whose answer the message begins; `field`: its place in the request.

    Raises InvalidRequest unless it is a text of the assistant, and for an answer with a form, which
    a grammar would begin anew.
    """
    if message.role != "assistant" or message.tool_calls or not message.content.strip():
        reason = "an answer is begun by a text of the assistant, without calls"
        raise InvalidRequest(field, reason)
    form = turn.sampling and turn.sampling.constraint
    if form and (form.schema or form.grammar or form.tool_choice is ToolChoice.REQUIRED):
        reason = "an answer that has a form cannot be begun; leave the form or this message out"
        raise InvalidRequest(field, reason)
    return replace(turn, opening=message.content)
