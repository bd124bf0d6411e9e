"""The sender of a request, as its turn records it."""

import pytest

from services.access.principals import name_client


@pytest.mark.parametrize(
    ("user_agent", "client"),
    [
        ("OpenAI/Python 1.99.0", "OpenAI/Python"),
        ("claude-cli/2.0.1 (external, cli)", "claude-cli/2.0.1"),
        ("curl/8.5.0", "curl/8.5.0"),
        ("curl", "curl"),
        ("", ""),
        (" curl", ""),
        ("<b>/1", ""),
        ("é/1", ""),
        ("x" * 500, "x" * 40),
    ],
)
def test_a_client_is_the_first_program_of_its_user_agent(user_agent: str, client: str) -> None:
    assert name_client(user_agent) == client
