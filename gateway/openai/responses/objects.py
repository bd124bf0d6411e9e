"""The response object, with every member that strict clients expect."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.openai.errors import OVERFLOW_CODE
from gateway.openai.responses.schemas import ResponseBody
from gateway.openai.responses.tools import describe_tools
from kvrecall.domain.messages import Sampling
from kvrecall.domain.reports import TurnOutcome
from services.usage import build_receipt, count_tokens

Json = dict[str, Any]


def build_head(id: str, created: int, body: ResponseBody, default: Sampling) -> Json:
    """Build a response that is in progress; `created` is in Unix seconds.

    `default`: what the body does not name.
    """
    text = body.text
    reasoning = body.reasoning
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": body.background is True,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": default.temperature if body.temperature is None else body.temperature,
        "text": {
            "format": body.text_form or {"type": "text"},
            "verbosity": None if text is None else text.verbosity,
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": describe_tools([tool for _, tool in body.placed_tools]),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": default.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def complete(
    head: Json, output: Sequence[Json], outcome: TurnOutcome, appended: int, at: int
) -> Json:
    """Build the response as it ended, at Unix time `at`; `appended` as for `count_tokens`."""
    incomplete = outcome.finish_reason == "length"
    return head | {
        "completed_at": None if incomplete else at,
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "output": list(output),
        "usage": build_usage(outcome, appended),
    }


def queue(head: Json) -> Json:
    """Return a response in the background as it begins."""
    return head | {"status": "queued", "output": [], "usage": None}


def is_committed(response: Json) -> bool:
    """Return whether the response's turn is part of its session."""
    return response["status"] in ("completed", "incomplete")


def fail(head: Json, output: Sequence[Json], error: Mapping[str, Any], status: int) -> Json:
    """Build the response that an error ended; `error` is OpenAI's, `status` its HTTP status."""
    code = "server_error" if status >= 500 else "invalid_prompt"
    if status == 429:
        code = "rate_limit_exceeded"
    if error["code"] == OVERFLOW_CODE:  # beside the SDK's list, and what clients look for
        code = OVERFLOW_CODE
    return head | {
        "status": "failed",
        "error": {"code": code, "message": error["message"]},
        "output": list(output),
    }


def build_usage(outcome: TurnOutcome, appended: int) -> Json:
    """Build the usage of a response; `appended` as for `count_tokens`."""
    tokens = count_tokens(outcome, appended)
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {
            "cached_tokens": tokens.cached,
            "cache_write_tokens": tokens.written,
        },
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
        "total_tokens": tokens.total,
        "kvrecall": build_receipt(outcome),
    }
