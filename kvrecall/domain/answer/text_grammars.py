"""Grammars of texts in Lark's syntax, and of the same texts written within a JSON string.

A model writes most arguments of its calls as JSON. A grammar that an argument's text follows is
rewritten for the text with JSON's escapes: each character has one form, raw where JSON allows it,
else its short escape.

llguidance's lexer never goes back: at a backslash a terminal that may go on with an escape is not
left for one that begins with another. So a grammar without recursion becomes a single terminal. In
one with recursion, classes of characters have no escapes: it accepts fewer texts, none that is wrong.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

_STRING = r'"(?:\\.|[^"\\\n])*"'
_TOKEN = re.compile(
    rf"""(?P<comment>(?:\#|//)[^\n]*)
    | (?P<range>{_STRING}\s*\.\.\s*{_STRING})
    | (?P<string>{_STRING}) (?P<fold>i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/ (?P<flags>[imslux]*)
    | (?P<import>%import[^\n]*)
    | (?P<ignore>%ignore\b)
    | (?P<foreign>%\w* | @ | <)
    | (?P<alias>->\s*\w+)
    | (?P<mark>[?!]*) (?P<name>_?[A-Za-z][\w-]*) (?P<defined>(?:\.-?\d+)?\s*:)?
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_IMPORT = re.compile(r"%import\s+common\s*\.\s*(\w+)(?:\s*->\s*(\w+))?\s*$")
_IMPORTS = re.compile(r"%import\s+common\s*\(([\w\s,]*)\)\s*$")
# Lark's common terminals with characters that JSON escapes.
_COMMON = {
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
    "C_COMMENT": r"/\/\*([^*]|\*+[^*\/])*\*+\//",
}
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_RAW = r'[^"\\\x00-\x1f]'
# In a regular expression: escapes of one character, and of classes.
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_CLASS_ESCAPES = frozenset("dDsSwW")
_PIECE = re.compile(
    r"""(?P<code>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[xu]\{[0-9A-Fa-f]+\}))
    | (?P<property>\\[pP](?:\{[^}]*\}|.))
    | \\(?P<escape>.)
    | \(\?(?P<open>[a-z-]*):
    | \(\?(?P<set>[a-z-]+)\)
    | (?P<class>\[)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def regex_to_grammar(regex: str) -> str:
    """Return the grammar of the texts that a regular expression matches from start to end."""
    return "start: /" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex) + "/"


def check_grammar(grammar: str) -> None:
    """Raise ValueError for what is not Lark's own: llguidance's extensions, special tokens."""
    for token in _TOKEN.finditer(grammar):
        if token["foreign"]:
            raise ValueError(f"{token.group()!r} is not supported in the grammar of a text")


def quote_grammar(grammar: str) -> str:
    """Return the grammar of the same texts within a JSON string, without the quotes around it.

    Raises ValueError for a part that cannot be written so.
    """
    check_grammar(grammar)
    tokens = list(_TOKEN.finditer(grammar))
    if _is_regular(tokens):
        names = _name_terminals(tokens)
        return f"start: {names['start']}\n" + "".join(_quote(each, names) for each in tokens)
    return "".join(_quote(each, None) for each in tokens)


def close_grammar(grammar: str, end: str) -> str:
    """Return the grammar of the same texts, raw, with `end` behind them.

    One without recursion ends at the first `end`, which a text such as `/(?s:.)+/` would take in.
    Raises ValueError as `check_grammar`.
    """
    check_grammar(grammar)
    tokens = list(_TOKEN.finditer(grammar))
    suffix = json.dumps(end)
    if _is_regular(tokens):
        names = _name_terminals(tokens)
        head = f"start[suffix={suffix}]: {names['start']}\n"
    else:
        names = {"start": "whole-text"}
        head = f"start: whole-text {suffix}\n"
    return head + "".join(_rename(each, names) for each in tokens)


def _name_terminals(tokens: Sequence[re.Match[str]]) -> dict[str, str]:
    """Return the names that rules have as terminals, which are in capitals."""
    names = [each["name"] for each in tokens if each["defined"]]
    return {name: f"R_{name.upper()}" for name in names if not name.isupper()}


def _is_regular(tokens: Sequence[re.Match[str]]) -> bool:
    """Return whether a grammar can be one terminal: `start` leads to no recursion."""
    uses: dict[str, set[str]] = {}
    current: set[str] = set()
    for token in tokens:
        if token["ignore"]:
            return False  # what is ignored may stand between any two terminals
        if token["defined"]:
            current = uses.setdefault(token["name"], set())
        elif token["name"]:
            current.add(token["name"])
    try:
        TopologicalSorter(uses).prepare()
    except CycleError:
        return False
    return "start" in uses


def _quote(token: re.Match[str], names: Mapping[str, str] | None) -> str:
    """Quote a token; `names`: those that rules have as terminals, None where they stay rules."""
    whole = names is not None
    if token["range"]:
        first, last = (json.loads(text) for text in re.findall(_STRING, token["range"]))
        return _quote_regex(f"[{re.escape(first)}-{re.escape(last)}]", "", whole)
    if token["string"]:
        text = json.loads(token["string"])
        quoted = json.dumps(text, ensure_ascii=False)[1:-1]
        if token["fold"] and quoted != text:
            raise ValueError(f"{token.group()} has characters that JSON escapes; leave its i out")
        return json.dumps(quoted, ensure_ascii=False) + token["fold"]
    if token["regex"]:
        return _quote_regex(token["regex"], token["flags"], whole)
    if token["import"]:
        return "\n".join(_quote_import(token["import"].strip(), whole))
    return _rename(token, names or {})


def _rename(token: re.Match[str], names: Mapping[str, str]) -> str:
    """Write a token with another name, and without what only a parse tree needs."""
    if token["name"]:
        return names.get(token["name"], token["name"]) + (":" if token["defined"] else "")
    return "" if token["comment"] or token["alias"] else token.group()


def _quote_import(line: str, whole: bool) -> Iterator[str]:
    single, several = _IMPORT.match(line), _IMPORTS.match(line)
    if single is not None:
        names = [(single[1], single[2] or single[1])]
    elif several is not None:
        names = [(name.strip(), name.strip()) for name in several[1].split(",")]
    else:
        raise ValueError(f"{line!r} is not supported; only imports from common are")
    for name, alias in names:
        if name in _COMMON:
            yield f"{alias}: {_quote_regex(_COMMON[name][1:-1], '', whole)}"
        else:
            yield f"%import common.{name}" + ("" if alias == name else f" -> {alias}")


def _quote_regex(regex: str, flags: str, whole: bool) -> str:
    """Quote a regular expression; `whole`: its classes have escapes."""
    if "x" in flags:
        raise ValueError("the flag x of regular expressions is not supported; leave it out")
    dotall = ["s" in flags]  # of each open group
    pieces: list[str] = []
    at = 0
    while (piece := _PIECE.match(regex, at)) is not None:
        at = piece.end()
        if piece["class"]:
            end = _find_class_end(regex, at)
            pieces.append(_quote_class(regex[at - 1 : end], whole))
            at = end
        else:
            pieces.append(_quote_piece(piece, dotall, whole))
    kept = flags.replace("s", "")
    return f"/{''.join(pieces)}/{kept}"


def _quote_piece(piece: re.Match[str], dotall: list[bool], whole: bool) -> str:
    """Quote a piece of a regular expression that is no class in brackets."""
    text = piece.group()
    if piece["open"] is not None or piece["set"]:
        flags = piece["open"] or piece["set"] or ""
        now = dotall[-1] if "s" not in flags else "s" in flags.partition("-")[0]
        if piece["set"]:
            dotall[-1] = now
        else:
            dotall.append(now)
        return text
    if piece["code"]:
        code = piece["code"][2:].strip("{}")
        return _quote_character(chr(int(code, 16)), text)
    if piece["property"] or piece["escape"] in _CLASS_ESCAPES:
        return _quote_class(f"[{text}]", whole)
    if piece["escape"]:
        return _quote_character(_CONTROL.get(piece["escape"], piece["escape"]), text)
    if text == ".":
        return _quote_class(r"[\s\S]" if dotall[-1] else r"[^\n]", whole)
    if text == "(":
        dotall.append(dotall[-1])
    elif text == ")" and len(dotall) > 1:
        dotall.pop()
    return _quote_character(text, text)


def _quote_character(character: str, written: str) -> str:
    """Quote one character, which is `written` so in the regular expression."""
    if character in _ESCAPES:
        return f"(?-i:{re.escape(chr(92) + _ESCAPES[character])})"
    if character < " ":
        return rf"(?-i:\\u{ord(character):04x})"
    return written


def _quote_class(text: str, whole: bool) -> str:
    """Quote a class in brackets: what of it is raw in JSON, or with `whole` a short escape."""
    is_member = _find_member(text)
    escapes = "".join(escape for each, escape in _ESCAPES.items() if whole and is_member(each))
    raw = rf"[{text}&&{_RAW}]"
    return rf"(?:{raw}|(?-i:\\[{re.escape(escapes)}]))" if escapes else raw


def _find_member(text: str) -> Callable[[str], object]:
    """Return the test whether a character is in a class; of what Python has not, none is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for a nested set, which Python reads otherwise
        try:
            return re.compile(text).fullmatch
        except (re.error, FutureWarning):
            return lambda _: None


def _find_class_end(regex: str, at: int) -> int:
    """Return the place behind the bracket that closes the class whose inside begins at `at`."""
    depth = 1
    at += regex[at : at + 1] == "^"
    at += regex[at : at + 1] == "]"  # as the first one it is a member
    while at < len(regex) and depth:
        if regex[at] == "\\":
            at += 1
        else:
            depth += (regex[at] == "[") - (regex[at] == "]")
        at += 1
    return at
