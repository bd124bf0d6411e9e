"""The header that names what a request was answered without."""

import pytest
from h11 import Response

from gateway.conversation.ignored import HEADER, format_header
from kvrecall.domain.tolerance.ignored import Ignored


@pytest.mark.parametrize("name", ["\u2028\u2029", " ", "", "a ", "ü\n", "x" * 119 + " y", ", "])
@pytest.mark.parametrize("last", [True, False])
def test_members_of_any_name_make_a_value_that_a_server_can_send(name: str, last: bool) -> None:
    parts = [Ignored("logprobs", ""), Ignored(name, "")]
    value = format_header(parts if last else parts[::-1])
    assert value.count(", ") == 1
    Response(status_code=200, headers=[(HEADER, value)])  # raises for what is no header
