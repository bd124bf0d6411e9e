"""Further arguments of the model's chat template, as all APIs take them."""

import json
from typing import Annotated

from pydantic import AfterValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from gateway.rest.schemas.base import JsonObject

# Bytes of JSON: a rendering has them as often as its template reads them.
_MAX_BYTES = 16 << 10
# Arguments of a rendering that are not the template's own.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def _check(arguments: JsonObject) -> JsonObject:
    if len(json.dumps(arguments)) > _MAX_BYTES:
        raise ValueError(f"arguments of a chat template have at most {_MAX_BYTES} bytes")
    reserved = sorted(_RESERVED.intersection(arguments))
    if reserved:
        message = "{name} is given by the request itself; leave it out"
        errors = [
            InitErrorDetails(
                type=PydanticCustomError("reserved", message, {"name": name}),
                loc=(name,),
                input=arguments[name],
            )
            for name in reserved
        ]
        raise ValidationError.from_exception_data("chat_template_kwargs", errors)
    return arguments


TemplateArguments = Annotated[JsonObject, AfterValidator(_check)]
