"""Why some of llama.cpp's cases do not pass, by suite and case."""

from collections.abc import Mapping

_ALIASES = "asks for one name of the model; this server has those that the tests use as aliases"
_OWN_API = (
    "llama.cpp's own route or member: /props, /slots, /apply-template, __verbose, timings, ..."
)
_OWN_MODEL = "asks for the words, token counts, context or build of llama.cpp's test model"
_FIRST_CHUNK = "wants no content in a stream's first chunk; OpenAI's API sends an empty one"
_PERMISSIVE = "accepted by llama.cpp, refused here and by Anthropic's API"

REASONS: Mapping[str, str] = {
    "basic::test_server_multiple_addresses": "starts servers with a key of its own",
    "basic::test_server_props": _OWN_API,
    "basic::test_server_models": _ALIASES,
    "basic::test_server_slots": _OWN_API,
    "basic::test_load_split_model": "loads a model of its own",
    "basic::test_no_ui": "asks for llama.cpp's page at /",
    "basic::test_server_model_aliases_and_tags": _ALIASES,
    "chat_completion::test_chat_completion": _OWN_MODEL,
    "chat_completion::test_chat_completion_cached_tokens": _OWN_MODEL,
    "chat_completion::test_chat_completion_stream": _FIRST_CHUNK,
    "chat_completion::test_chat_completion_with_openai_library": _OWN_MODEL,
    "chat_completion::test_chat_template": _OWN_API,
    "chat_completion::test_chat_template_assistant_prefill": _OWN_API,
    "chat_completion::test_chat_template_continue_final_message_vllm_compat": _OWN_API,
    "chat_completion::test_apply_chat_template": _OWN_API,
    "chat_completion::test_completion_with_response_format": "takes `items` alone for an array; "
    "JSON Schema allows any value",
    "chat_completion::test_invalid_chat_completion_req": "two answers at the end are refused; here, "
    "as by OpenAI, they are a history",
    "chat_completion::test_chat_completion_with_timings_per_token": _OWN_API,
    "chat_completion::test_logprobs_stream": _FIRST_CHUNK,
    "chat_completion::test_context_size_exceeded": _OWN_MODEL,
    "chat_completion::test_context_size_exceeded_stream": _OWN_MODEL,
    "chat_completion::test_return_progress": _OWN_API,
    "chat_completion::test_chat_completions_multiple_choices": _OWN_MODEL,
    "chat_completion::test_chat_completions_token_count": _OWN_API,
    "chat_completion::test_verbose_debug": _OWN_API,
    "compat_anthropic::test_anthropic_tool_result_with_image": "images are placeholders, not errors",
    "compat_anthropic::test_anthropic_vision_format_accepted": "images are placeholders, not errors",
    "compat_anthropic::test_anthropic_vision_base64_with_multimodal_model": "needs a vision model",
    "compat_anthropic::test_anthropic_empty_messages": _PERMISSIVE,
    "compat_anthropic::test_anthropic_thinking_history_in_count_tokens": "reasoning of a history is "
    "not read: the session has it",
    "compat_anthropic::test_anthropic_thinking_history_in_template": _OWN_API,
    "compat_oai_responses::test_responses_with_openai_library": _OWN_MODEL,
    "compat_oai_responses::test_responses_stream_with_openai_library": _OWN_MODEL,
    "compat_oai_responses::test_responses_stream_with_llama_telemetry": _OWN_API,
    "tokenize::test_tokenize_with_bos": _OWN_MODEL,
}
