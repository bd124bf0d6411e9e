"""The route of OpenAI's completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from gateway.conversation.answers import require_model, respond
from gateway.conversation.directives import read_directives, report_changes
from gateway.http.settings import GatewaySettings
from gateway.http.sse import get_outcome
from gateway.http.tenants import Tenant
from gateway.openai.completions.objects import Asked, TextChunks, build_completion
from gateway.openai.completions.schemas import NO_LIMIT, CompletionBody, Prompt
from gateway.openai.schemas import StreamOptions
from kvrecall.domain.errors import ContextExceeded, InvalidRequest
from services.conversations.completions import Completions
from services.service import SessionService
from services.streams.turn import TurnProgress

_STREAM = {
    "description": "The answers, or the stream of their chunks.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def add_completion_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the route of completions."""

    @router.post("/completions", responses={200: _STREAM}, tags=["openai"])
    async def create_completion(request: Request, body: CompletionBody, tenant: Tenant = "") -> Any:
        """Complete prompts as they are, without a chat template.

        Each answer is computed in a session of its own, which is deleted behind it, so a repeated
        request is answered anew.
        """
        require_model(body.model, service, settings)
        body = read_directives(request, body)
        body.require_honoured()
        prompts = body.read_prompts()
        tokens = await asyncio.gather(*(_tokenize(service, body, each) for each in prompts))
        turn = body.turn_to_domain(service.limits, service.default_sampling)
        settings_of_session = body.settings_to_domain(tenant, ())
        limit = service.info.get_limit(recall=settings_of_session.recall)
        for index, each in enumerate(tokens):
            _check_length(each, index, None if limit is None else limit - turn.generate)
        asked = Asked(
            body.model,
            service.info.fingerprint[:16],
            tokens,
            body.choices,
            await _read_texts(service, prompts, tokens) if body.echo else (),
        )
        turns = [
            replace(turn, prompt=each, seed=_vary(turn.seed, choice))
            for each in tokens
            for choice in range(body.choices)
        ]
        options = body.stream_options or StreamOptions()
        return await respond(
            request,
            service.conversations.completions(settings_of_session, turns),
            partial(_read, asked, len(turns)),
            (lambda _: TextChunks(asked, options)) if body.stream else None,
            settings,
            report_changes(service, body),
        )


async def _read(asked: Asked, count: int, found: Completions) -> dict[str, Any]:
    """Read all answers to their ends and build their object."""
    received: list[list[TurnProgress]] = [[] for _ in range(count)]
    async for each in found.stream:
        received[each.choice].append(each.progress)
    return build_completion(asked, [get_outcome(one) for one in received])


async def _tokenize(
    service: SessionService, body: CompletionBody, prompt: Prompt
) -> tuple[int, ...]:
    """Return the tokens of a prompt, cut to its last ones if the request says so."""
    if isinstance(prompt, str):
        tokens = await service.tokenize_text(prompt, body.add_special_tokens is not False)
    else:
        tokens = prompt
    most = body.truncate_prompt_tokens
    if most == NO_LIMIT:
        most = service.info.max_context - body.wanted_tokens
    return tokens[max(0, len(tokens) - most) :] if most is not None and most > 0 else tokens


def _check_length(tokens: Sequence[int], index: int, most: int | None) -> None:
    """Raise InvalidRequest for an empty prompt, ContextExceeded for one over a session's end."""
    if not tokens:
        message = (
            f"prompt {index} has no token, and this model's tokenizer adds none; send some text"
        )
        raise InvalidRequest("prompt", message)
    if most is not None and len(tokens) > most:
        raise ContextExceeded("prompt", len(tokens), most)


async def _read_texts(
    service: SessionService, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]]
) -> list[str]:
    """Return the prompts as texts: as they were sent, or decoded."""
    return [
        prompt if isinstance(prompt, str) else await service.detokenize(ids)
        for prompt, ids in zip(prompts, tokens, strict=True)
    ]


def _vary(seed: int | None, choice: int) -> int | None:
    """Return another seed for each answer to a prompt; the first has the request's own."""
    return seed if seed is None or not choice else (seed + choice) % 2**63
