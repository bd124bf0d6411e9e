"""What a PromQL expression asks for: its series, and the labels that each of them must have."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as promql


@dataclass(frozen=True)
class Selector:
    """A series of an expression, with the labels that it is selected, grouped or matched by."""

    series: str
    labels: frozenset[str]


def find_selectors(expression: str) -> list[Selector]:
    """Return the selectors of an expression. Raises ValueError if it is no PromQL."""
    return list(_walk(promql.parse(expression), frozenset()))


def _walk(node: promql.Expr, labels: frozenset[str]) -> Iterator[Selector]:
    match node:
        case promql.VectorSelector():
            named = {matcher.name for matcher in node.matchers.matchers}
            assert node.name is not None, "a selector without a metric's name"
            yield Selector(node.name, labels | named)
        case promql.MatrixSelector():
            yield from _walk(node.vector_selector, labels)
        case promql.AggregateExpr():
            # Labels outside of a grouping are those of its result: they must be grouped by.
            grouped = frozenset(node.modifier.labels if node.modifier is not None else ())
            assert labels <= grouped, f"{set(labels - grouped)} are not labels of: {node}"
            yield from _walk(node.expr, grouped)
        case promql.BinaryExpr():
            matching = node.modifier.matching if node.modifier is not None else None
            matched = frozenset(matching.labels) if matching is not None else frozenset()
            for side in (node.lhs, node.rhs):
                yield from _walk(side, labels | matched)
        case promql.Call():
            for argument in node.args:
                outer = frozenset({"le"}) if node.func.name == "histogram_quantile" else labels
                yield from _walk(argument, outer)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _walk(node.expr, labels)
        case promql.NumberLiteral() | promql.StringLiteral():
            pass
        case _:
            raise TypeError(f"unknown part of an expression: {type(node).__name__}")
