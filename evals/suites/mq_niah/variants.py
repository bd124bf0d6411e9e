"""Suites of MQ-NIAH by name, with their default sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evals.codecs import RAW
from evals.conditions import CONDITIONS
from evals.errors import BadCodec, BadSuite
from evals.suite import Suite
from evals.suites.mq_niah import anytime, policies, revisit
from evals.suites.mq_niah import suite as frontier
from evals.suites.mq_niah.case import Protocol
from kvstore.settings import CodecName

TOKENS = 2000
FRONTIERS = {"2q": 2, "4q": 4, "6q": 6, "8q": 8}
ALONE = ("revisit", "policies", "anytime")


@dataclass(frozen=True)
class SuiteRequest:
    """A request for suites by name.

    `names` are any of FRONTIERS, or one of ALONE. Empty `ks` stand for the suite's own. `codecs`
    are those of stored rows; several are compared in FRONTIERS. `conditions` beside the full cache
    are those of FRONTIERS; empty: all.
    """

    names: tuple[str, ...]
    ks: tuple[int, ...]
    seed: int
    cases: int
    codecs: tuple[CodecName, ...] = (RAW,)
    conditions: tuple[str, ...] = ()


def build_suite(protocol: Protocol, request: SuiteRequest) -> Suite[Any]:
    """The requested suite, ready to run.

    0 tokens and an empty base of the protocol stand for the suite's own. Raises BadSuite, BadCodec.
    """
    if all(name in FRONTIERS for name in request.names):
        counts = [FRONTIERS[name] for name in request.names]
        bases = {count: protocol.base or frontier.BASE_BUDGETS[count] for count in counts}
        sized = _with_tokens(protocol, TOKENS)
        ks = request.ks or frontier.KS
        if unknown := [name for name in request.conditions if name not in CONDITIONS]:
            raise BadSuite(
                f"there is no condition {unknown[0]!r}; there are {', '.join(CONDITIONS)}"
            )
        return frontier.suite(
            sized,
            counts,
            ks,
            request.seed,
            request.cases,
            bases,
            request.codecs,
            request.conditions,
        )
    if len(request.names) != 1 or request.names[0] not in ALONE:
        known = f"{', '.join(FRONTIERS)} (any of them together), {', '.join(ALONE)} (each alone)"
        raise BadSuite(f"{' '.join(request.names)!r} is no suite of mq-niah; there are {known}")
    if len(request.codecs) > 1:
        raise BadCodec(
            f"{request.names[0]} takes one codec; several are compared in {', '.join(FRONTIERS)}"
        )
    return _build_alone(request.names[0], replace(protocol, codec=request.codecs[0]), request)


def _build_alone(name: str, protocol: Protocol, request: SuiteRequest) -> Suite[Any]:
    seed = request.seed
    cases = request.cases
    if name == "policies":
        sized = _with_tokens(protocol, TOKENS)
        return policies.suite(sized, request.ks or frontier.KS, seed, cases)
    if name == "revisit":
        sized = _with_tokens(protocol, TOKENS)
        return revisit.suite(sized, _single_k(request.ks, revisit.K), seed, cases)
    sized = _with_tokens(protocol, anytime.TOKENS)
    return anytime.suite(sized, _single_k(request.ks, anytime.K), seed, cases)


def _single_k(ks: Sequence[int], default: int) -> int:
    if len(ks) > 1:
        raise BadSuite("revisit and anytime take one K")
    return ks[0] if ks else default


def _with_tokens(protocol: Protocol, tokens: int) -> Protocol:
    return replace(protocol, tokens=protocol.tokens or tokens)
