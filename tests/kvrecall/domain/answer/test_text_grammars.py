"""A grammar within a JSON string accepts the same texts as the grammar itself."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvrecall.domain.answer.text_grammars import close_grammar, quote_grammar, regex_to_grammar

BYTES = LLTokenizer("byte")
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?  // the last line
hunk: "*** Update File: " filename LF line+
filename: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""
SUM = """
?start: sum
sum: product ("+" product)*
product: value ("*" value)*
value: INT | "(" sum ")" | "\\"" /[a-z]/ "\\""
%import common (INT, WS_INLINE)
%ignore WS_INLINE
"""


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def accepts_quoted(grammar: str, text: str) -> bool:
    """Whether a grammar accepts a text within a JSON string."""
    outer = 'start: "{\\"a\\": \\"" @text "\\"}"'
    grammars = [{"lark_grammar": outer}, {"name": "text", "lark_grammar": quote_grammar(grammar)}]
    return accepts(json.dumps({"grammars": grammars}), json.dumps({"a": text}, ensure_ascii=False))


@pytest.mark.parametrize(
    ("regex", "right", "wrong"),
    [
        (r'[^\n"]+', "a\\b\tc", 'a"'),
        (r"\w+\s\w+", "a\tb", 'a"b'),
        (r"[\r\n]+", "\r\n\n", "a"),
        (r"(?s:.)+x.", 'a\n"xy', "ax\n"),
        (r"(?s).+(?-s:.)", "a\nb", "a\n"),
        (r".+", 'a"\\é😀', "a\n"),
        (r'[\]"a]+', ']"', "b"),
        (r"[^]x]+", "a[", "]"),
        (r"https?://[^\s/]+/x", 'http://a"b/x', "http://a b/x"),
        (r"\p{Lu}+", "ÄÖ", "a"),
        (r"\x22a\u{9}", '"a\t', "a\t"),
        (r"(?i)ab\n", "AB\n", "ab"),
        (r"[a-z&&[^aeiou]]+", "bcd", "a"),
        (r"a\/b|[/]x", "/x", "x"),
        ("\x01?a", "\x01a", "b"),
    ],
)
def test_a_regular_expression_accepts_the_same_texts(regex: str, right: str, wrong: str) -> None:
    grammar = regex_to_grammar(regex)
    for text, expected in ((right, True), (wrong, False)):
        assert accepts(grammar, text) == accepts_quoted(grammar, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*** Begin Patch\n*** Update File: a\n-x\n+y\n*** End Patch\n", True),
        ('*** Begin Patch\n*** Update File: a "b"\n-\tx = "\\n"\n+é😀\n \n*** End Patch', True),
        ("*** Begin Patch\n*** Update File: a\n*x\n*** End Patch\n", False),
        ("*** Begin Patch\n*** Update File: a\n-x*** End Patch\n", False),
    ],
)
def test_lines_of_a_patch_end_at_their_escaped_ends(text: str, expected: bool) -> None:
    assert accepts(PATCH, text) == accepts_quoted(PATCH, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1 + 2*(3 + 4)", True), ('("a" + 1)*2', True), ("1 +", False), ("(1", False)],
)
def test_a_grammar_with_recursion_stays_one(text: str, expected: bool) -> None:
    assert accepts(SUM, text) == accepts_quoted(SUM, text) == expected


def test_ranges_and_imports_by_other_names_are_rewritten() -> None:
    grammar = 'start: "a".."f" GAP "x"i\n%import common.WS -> GAP'
    assert accepts_quoted(grammar, "b\n\tX")
    assert not accepts_quoted(grammar, "g x")


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r"start: /[\s\S]+/", "a\n<b>\n"),
        (PATCH, "*** Begin Patch\n*** Update File: a\n-x\n+y\n*** End Patch"),
        (SUM, "1 + (2*3)"),
        ('?start.2: a -> b\na: "x" // no more', "x"),
    ],
)
def test_a_raw_text_ends_at_the_first_end(grammar: str, text: str) -> None:
    closed = close_grammar(grammar, "\n</p>\n")
    outer = 'start: "<p>" @text "."'
    whole = json.dumps(
        {"grammars": [{"lark_grammar": outer}, {"name": "text", "lark_grammar": closed}]}
    )
    assert accepts(whole, f"<p>{text}\n</p>\n.")
    assert not accepts(whole, f"<p>{text}.")


@pytest.mark.parametrize(
    "grammar",
    ["start: <[1]>", "start: @other", 'start: "a\\n"i', "start: /a b/x", "%import python.NAME"],
)
def test_what_cannot_be_written_within_json_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"support|leave"):
        quote_grammar(grammar)
