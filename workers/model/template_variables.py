"""The variables of a chat template that a request may set."""

from collections.abc import Iterable

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerFast

# What a rendering gives to every template: the conversation, and transformers' functions.
_GIVEN = frozenset(
    {
        "add_generation_prompt",
        "documents",
        "messages",
        "raise_exception",
        "strftime_now",
        "tools",
    }
)


class _Generation(Extension):
    """transformers' own tag around answers, read as what it stands around."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own form

    def parse(self, parser: Parser) -> list[Node]:
        """Read the nodes up to the tag's end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def find_template_variables(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Find what the chat template reads beside the conversation, such as `enable_thinking`.

    None of a template that cannot be read, which refuses every conversation.
    """
    own = tokenizer.chat_template
    texts = own.values() if isinstance(own, dict) else [own or ""]
    try:
        return tuple(sorted(_find_undeclared(texts) - _GIVEN))
    except TemplateError:
        return ()


def _find_undeclared(texts: Iterable[str]) -> set[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    return {name for text in texts for name in find_undeclared_variables(environment.parse(text))}
