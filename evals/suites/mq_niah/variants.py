"""Which of MQ-NIAH's suites a name means, with what it is run by default."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evals.codecs import RAW
from evals.errors import BadCodec, BadSuite
from evals.suite import Suite
from evals.suites.mq_niah import anytime as mq_niah_anytime
from evals.suites.mq_niah import policies as mq_niah_policies
from evals.suites.mq_niah import revisit as mq_niah_revisit
from evals.suites.mq_niah import suite as mq_niah
from evals.suites.mq_niah.case import Protocol
from kvstore.settings import CodecName

TOKENS = 2000
FRONTIERS = {"2q": 2, "4q": 4, "6q": 6, "8q": 8}
ALONE = ("revisit", "policies", "anytime")


@dataclass(frozen=True)
class Chosen:
    """What is asked for. `names`: of FRONTIERS any, or one of ALONE; no `ks`: the suite's own.

    `codecs`: of stored rows; several are compared in FRONTIERS.
    """

    names: tuple[str, ...]
    ks: tuple[int, ...]
    seed: int
    cases: int
    codecs: tuple[CodecName, ...] = (RAW,)


def suite_of(protocol: Protocol, chosen: Chosen) -> Suite[Any]:
    """The suite, ready to run; the protocol's 0 tokens and empty base stand for the suite's own.

    Raises BadSuite, BadCodec.
    """
    if all(name in FRONTIERS for name in chosen.names):
        counts = [FRONTIERS[name] for name in chosen.names]
        bases = {count: protocol.base or mq_niah.BASE_OF[count] for count in counts}
        made = _of_length(protocol, TOKENS)
        ks = chosen.ks or mq_niah.KS
        return mq_niah.suite(made, counts, ks, chosen.seed, chosen.cases, bases, chosen.codecs)
    if len(chosen.names) != 1 or chosen.names[0] not in ALONE:
        known = f"{', '.join(FRONTIERS)} (any of them together), {', '.join(ALONE)} (each alone)"
        raise BadSuite(f"{' '.join(chosen.names)!r} is no suite of mq-niah; there are {known}")
    if len(chosen.codecs) > 1:
        raise BadCodec(
            f"{chosen.names[0]} takes one codec; several are compared in {', '.join(FRONTIERS)}"
        )
    return _alone(chosen.names[0], replace(protocol, codec=chosen.codecs[0]), chosen)


def _alone(name: str, protocol: Protocol, chosen: Chosen) -> Suite[Any]:
    seed = chosen.seed
    cases = chosen.cases
    if name == "policies":
        made = _of_length(protocol, TOKENS)
        return mq_niah_policies.suite(made, chosen.ks or mq_niah.KS, seed, cases)
    if name == "revisit":
        made = _of_length(protocol, TOKENS)
        return mq_niah_revisit.suite(made, _one(chosen.ks, mq_niah_revisit.K), seed, cases)
    made = _of_length(protocol, mq_niah_anytime.TOKENS)
    return mq_niah_anytime.suite(made, _one(chosen.ks, mq_niah_anytime.K), seed, cases)


def _one(ks: Sequence[int], usual: int) -> int:
    if len(ks) > 1:
        raise BadSuite("revisit and anytime take one K")
    return ks[0] if ks else usual


def _of_length(protocol: Protocol, tokens: int) -> Protocol:
    return replace(protocol, tokens=protocol.tokens or tokens)
