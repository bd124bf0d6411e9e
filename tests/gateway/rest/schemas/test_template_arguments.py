"""Arguments of a chat template: bounded, and none that a rendering has by itself."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gateway.rest.schemas.template_arguments import TemplateArguments

ARGUMENTS: TypeAdapter[dict[str, Any]] = TypeAdapter(TemplateArguments)
MOST = 16 << 10


def test_they_have_16_kib_of_json() -> None:
    fits = {"text": "x" * (MOST - len('{"text": ""}'))}
    assert ARGUMENTS.validate_python(fits) == fits
    with pytest.raises(ValidationError, match=f"at most {MOST} bytes"):
        ARGUMENTS.validate_python({"text": f"{fits['text']}x"})


def test_each_that_the_request_gives_itself_is_named() -> None:
    with pytest.raises(ValidationError) as refused:
        ARGUMENTS.validate_python({"messages": [], "year": 2026, "add_generation_prompt": True})
    assert [error["loc"] for error in refused.value.errors()] == [
        ("add_generation_prompt",),
        ("messages",),
    ]
