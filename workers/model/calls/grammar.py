"""How the text of an answer's calls is held to a form: what a grammar of calls is built from."""

from dataclasses import dataclass

LINE = "\n?"
"""In a `CallGrammar`: a line break that may be there."""

NUMBER = "[0-9]+"
"""In a `CallGrammar`: a number."""


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one: texts before a key, behind it, and behind its value.

    `separator`: between two of them. `quoted`: a text is a JSON string; else it is as it is.
    """

    before: str
    between: str
    after: str = ""
    separator: str = ""
    quoted: bool = False


@dataclass(frozen=True)
class CallGrammar:
    """The text of an answer's calls behind the first mark, in pieces; `LINE` may be left out.

    Each call is `opening`, in which `{name}` stands for the tool's, its arguments, and `closing`.
    `separator`: between two calls; None if there is one at most. `parameters`: how arguments are
    written that are no JSON object. `quote`: the mark around texts, of arguments that are an object
    with bare keys and raw texts.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    separator: tuple[str, ...] | None = None
    before: str = ""
    after: str = ""
    parameters: Parameters | None = None
    quote: str = ""

    @property
    def pieces(self) -> tuple[str, ...]:
        """All pieces of text."""
        between = self.separator or ()
        own = self.parameters
        tags = (own.before, own.between, own.after) if own else ()
        return (*self.opening, *self.closing, *between, self.before, self.after, self.quote, *tags)
