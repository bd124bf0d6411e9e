"""Texts and conversations as tokens and back, in the forms of vLLM and of llama.cpp."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field

from gateway.conversation.answers import require_model
from gateway.conversation.bodies import MAX_MESSAGES, CheckedRequest
from gateway.conversation.ignored import IgnoredParts, Tolerance
from gateway.http.settings import GatewaySettings
from gateway.openai.chat_messages import MessageWire, convert_messages
from gateway.openai.chat_tools import ChatToolBody
from gateway.rest.schemas.base import Name
from gateway.rest.schemas.template_arguments import TemplateArguments
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message
from kvrecall.protocol.convert import message_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.service import SessionService

Json = dict[str, Any]
_MAX_TOKENS = 1 << 20


class OptionalModelRequest(CheckedRequest):
    """A request that may leave the model out."""

    model: Name | None = None


class TokenizeBody(OptionalModelRequest):
    """Body of POST /tokenize: one of `prompt` (vLLM), `content` (llama.cpp) and `messages`."""

    honoured: ClassVar[Mapping[str, Sequence[object]]] = {"chat_template": ()}

    prompt: str | None = None
    content: str | None = None
    messages: list[MessageWire] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[ChatToolBody] | None = Field(default=None, max_length=128)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments | None = None
    add_special_tokens: bool | None = None
    add_special: bool = False
    return_token_strs: bool | None = None
    with_pieces: bool = False

    def to_wire(self) -> pb.TokenizeRequest:
        """Convert to the worker's request. Raises InvalidRequest unless one thing is to be read."""
        given = [
            name for name in ("prompt", "content", "messages") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            message = "send one of prompt, content and messages"
            raise InvalidRequest(given[1] if given else "prompt", message)
        pieces = bool(self.return_token_strs or self.with_pieces)
        if self.content is not None:
            special = self.add_special
            return pb.TokenizeRequest(text=self.content, special_tokens=special, pieces=pieces)
        if self.prompt is not None:
            special = self.add_special_tokens is not False
            return pb.TokenizeRequest(text=self.prompt, special_tokens=special, pieces=pieces)
        tolerance = Tolerance(True, IgnoredParts())
        messages = list(convert_messages(self.messages or (), tolerance))
        begun = messages.pop() if self.continue_final_message else Message("assistant")
        return pb.TokenizeRequest(
            messages=map(message_to_wire, messages),
            tools=[
                tool.to_body(f"tools[{index}]").to_domain()
                for index, tool in enumerate(self.tools or ())
            ],
            without_answer=not (self.add_generation_prompt or begun.content),
            pieces=pieces,
            opening=begun.content,
            template_arguments=json.dumps(self.chat_template_kwargs or {}),
        )


class DetokenizeBody(OptionalModelRequest):
    """Body of POST /detokenize."""

    tokens: list[int] = Field(max_length=_MAX_TOKENS)


def add_token_routes(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    """Add the routes of tokens, which are not under /v1."""

    def require(body: OptionalModelRequest) -> None:
        if body.model is not None:
            require_model(body.model, service, settings)
        body.require_honoured()

    @router.post("/tokenize", tags=["openai"])
    async def tokenize(body: TokenizeBody) -> Json:
        """Return the tokens of a text, or of a conversation up to where its answer begins.

        A `prompt` gets the special tokens that the tokenizer puts around a text unless
        `add_special_tokens` is false; `content` gets them with `add_special`.
        """
        require(body)
        result = await service.tokenize(body.to_wire())
        ids, pieces = list(result.ids), list(result.pieces)
        if body.content is not None and body.with_pieces:
            pairs = zip(ids, pieces, strict=True)
            return {"tokens": [{"id": id, "piece": piece} for id, piece in pairs]}
        return {
            "count": len(ids),
            "max_model_len": service.info.max_context,
            "tokens": ids,
            "token_strs": pieces or None,
        }

    @router.post("/detokenize", tags=["openai"])
    async def detokenize(body: DetokenizeBody) -> Json:
        """Return the text of tokens, under the names of vLLM (`prompt`) and of llama.cpp (`content`)."""
        require(body)
        unknown = [token for token in body.tokens if not 0 <= token < 2**32]
        if unknown:
            raise InvalidRequest("tokens", f"{unknown[0]} is no token id")
        text = await service.detokenize(body.tokens)
        return {"prompt": text, "content": text}
