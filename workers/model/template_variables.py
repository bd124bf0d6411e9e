"""The variables of a chat template that a request may set."""

from collections.abc import Iterator

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Name, Node, Template
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerFast

# Names in every rendering: the conversation, and transformers' functions.
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
    """transformers' own tag around answers, which is read as its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own form

    def parse(self, parser: Parser) -> list[Node]:
        """Read the nodes up to the tag's end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def find_template_variables(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Find the variables that the chat template reads beside the conversation, such as `enable_thinking`.

    A template that cannot be read refuses every conversation: it has none.
    """
    own = tokenizer.chat_template
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    found: set[str] = set()
    try:
        for text in own.values() if isinstance(own, dict) else [own or ""]:
            found |= _find_read(environment.parse(text))
    except TemplateError:
        return ()
    return tuple(sorted(found - _GIVEN))


def _find_read(template: Template) -> set[str]:
    """Find the variables that are read before the template sets them.

    jinja2 also counts variables that are set and read within one branch.
    """
    first: dict[str, str] = {}
    for name in _walk(template):
        first.setdefault(name.name, name.ctx)
    return {name for name in find_undeclared_variables(template) if first.get(name) == "load"}


def _walk(node: Node) -> Iterator[Name]:
    """Yield the names in a node as a rendering comes to them: a value before what it is set to."""
    if isinstance(node, Name):
        yield node
    target = getattr(node, "target", None)
    for child in sorted(node.iter_child_nodes(), key=lambda child: child is target):
        yield from _walk(child)
