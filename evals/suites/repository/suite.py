"""Suite repository: a name removed from a place in the code (RepairKV 5.5, Table 2, Figure 6).

The context is several modules; the first turn asks about an unrelated one; then an event describes
a call without the called name. The repair signal is the event alone; every condition answers the
same event and question.

The reference model was never trained on code: with it, the rows that are brought back are
informative, the answers are not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from evals import harness, selectors
from evals.compressed import CompressedContext
from evals.conditions import (
    BASE,
    CONDITIONS,
    FULL,
    MATCHED,
    REPAIR,
    SPREAD,
    WITHOUT_K,
    BaselineState,
    ConditionResult,
    build_baseline,
)
from evals.configs import budget_rows
from evals.harness import Message
from evals.replay_session import open_replay_session
from evals.spans import decode_with_offsets, overlapping
from evals.suite import Record, Suite
from evals.suites.repository.examples import CallSite, build_call_site, build_donor_event
from evals.suites.repository.rows import CONTROLS, result_rows

PAPER_CONTEXT = 32768
PAPER_KS = (96, 192)
BASE_SHARE = "1/4"
TOOL_FILE = "ToolFile-K"
GATED = "spread, file-gated"
ANCHOR = "AnchorWindow-K"
COMPARED = (FULL, BASE, MATCHED, *CONTROLS, TOOL_FILE, REPAIR, SPREAD, GATED, ANCHOR)
_BLOCK_TOKENS = 512
# Rows beside the context: the first turn, and the event with its question and answer.
_EXTRA_ROWS = 512
_MAX_REPLY_TOKENS = 24


@dataclass(frozen=True)
class CodeCase:
    """One call site under all conditions. `tokens` is the size of the context."""

    model: str
    seed: int
    tokens: int
    ks: tuple[int, ...]
    base: str = BASE_SHARE

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"call site, seed {self.seed}"


@dataclass(frozen=True)
class SiteTokens:
    """Positions of a call site's parts in the context, int64 ascending.

    `file` is the calling file, `lines` the lines of the call and of the definition, `names` the
    name in them.
    """

    file: Tensor
    lines: Tensor
    names: Tensor = field(repr=False)


def suite(model: str, tokens: int, seed: int, cases: int) -> Suite[CodeCase]:
    """`cases` call sites; K is as large a share of the context as in the paper."""
    ks = tuple(max(1, round(k * tokens / PAPER_CONTEXT)) for k in PAPER_KS)
    units = tuple(CodeCase(model, case_seed, tokens, ks) for case_seed in range(seed, seed + cases))
    return Suite("repository", seed, model, units, run, partial(result_rows, seed=seed))


def context_tokens(model: str) -> int:
    """Size of the paper's context, at most half of the model's."""
    return min(PAPER_CONTEXT, harness.load(model).model.max_context // 2)


def run(unit: CodeCase) -> list[Record]:
    """Append the context, answer the first turn, compress; then measure every condition.

    Raises BadExample, BadBudget, `workers.errors`.
    """
    tokenizer = harness.load(unit.model).tokenizer

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    site = build_call_site(unit.seed, unit.tokens, count_tokens)
    donor = _user(build_donor_event(unit.seed, site))
    rows = harness.count_tokens(tokenizer, site.context()) + _EXTRA_ROWS
    with open_replay_session(
        unit.model, "snapkv", unit.seed, rows=rows, block_tokens=_BLOCK_TOKENS
    ) as session:
        token_ids = session.append(site.context())
        context = session.state.length
        observed = session.reply(site.first_question, _MAX_REPLY_TOKENS).observed
        scores = session.first_stage_scores(observed, context)
        base_rows = budget_rows(unit.base, context)
        cache = CompressedContext(session, context, context, base_rows, scores)
        signals = (_user(site.event), _user(site.first_question), donor)
        baseline = build_baseline(cache, *signals, seed=f"repository:{unit.seed}")
        tokens = _locate(site, *decode_with_offsets(tokenizer, token_ids[:context]))
        return list(_run_conditions(unit, site, baseline, tokens))


def _run_conditions(
    unit: CodeCase, site: CallSite, baseline: BaselineState, tokens: SiteTokens
) -> Iterator[Record]:
    for k in unit.ks:
        for name in COMPARED:
            if name in WITHOUT_K and k != unit.ks[0]:
                continue
            result = _apply(name, baseline, k, tokens)
            identity = {"seed": unit.seed, "condition": name, "k": 0 if name in WITHOUT_K else k}
            yield {"kind": "call site", **identity, **_measure(site, baseline, result, tokens)}


def _apply(name: str, baseline: BaselineState, k: int, tokens: SiteTokens) -> ConditionResult:
    if name in _LABELLED:
        return _LABELLED[name](baseline, k, tokens)
    return CONDITIONS[name](baseline, k)


def _measure(
    site: CallSite, baseline: BaselineState, result: ConditionResult, tokens: SiteTokens
) -> dict[str, Any]:
    cache = baseline.cache
    messages = [_user(f"{site.event}\n{site.question}")]
    active = cache.active_context(result.state)
    added = active[~torch.isin(active, baseline.base)]
    in_lines = float(torch.isin(added, tokens.lines).float().mean()) if len(added) else 0.0
    reply = cache.session.ask(result.state, messages, _MAX_REPLY_TOKENS)
    return {
        "expected": site.answer,
        "reply": reply,
        "right": float(site.is_answered_by(reply)),
        "log_prob": cache.session.log_prob(result.state, messages, site.answer),
        "held": float(torch.isin(tokens.names, active).float().mean()),
        "in_lines": in_lines,
        "context": cache.context,
        "budget": result.budget,
        "active_rows": cache.count_rows(result.state, result.budget),
        "seconds": result.repair_seconds,
    }


def _tool_file(baseline: BaselineState, k: int, tokens: SiteTokens) -> ConditionResult:
    """Evicted rows of the file that the event names, the oldest first, then the oldest of all."""
    inside = torch.isin(baseline.candidates, tokens.file)
    order = torch.cat([baseline.candidates[inside], baseline.candidates[~inside]])
    return baseline.with_tokens(order[:k])


def _gated(baseline: BaselineState, k: int, tokens: SiteTokens) -> ConditionResult:
    """Our selection among the rows of the file that the event names."""
    scores = baseline.signal_scores(torch.arange(baseline.cache.context))
    inside = baseline.candidates[torch.isin(baseline.candidates, tokens.file)]
    selected = selectors.select_spread(scores, inside, baseline.cache.scores, k)
    return baseline.with_tokens(selected)


def _anchor(baseline: BaselineState, k: int, tokens: SiteTokens) -> ConditionResult:
    """The evicted rows nearest to the name, an oracle: it is given the answer's position."""
    names = tokens.names.tolist()
    return baseline.with_tokens(selectors.nearest_tokens(baseline.candidates, names, k))


_LABELLED: Mapping[str, Callable[[BaselineState, int, SiteTokens], ConditionResult]] = (
    MappingProxyType({TOOL_FILE: _tool_file, GATED: _gated, ANCHOR: _anchor})
)


def _locate(site: CallSite, text: str, starts: Sequence[int]) -> SiteTokens:
    """Tokens of the calling file, the lines of call and definition, and the name in them.

    `text` is the context's text, `starts` the character offsets of its tokens.
    """
    file = overlapping(starts, text.find(site.calling.listing), site.calling.listing)
    lines = list[int]()
    names = list[int]()
    for module, number in ((site.calling, site.call.line), (site.defining, site.defined_on)):
        line = module.line(number)
        offset = text.find(f"\n{line}\n", text.find(module.listing)) + 1
        lines += overlapping(starts, offset, line)
        names += overlapping(starts, offset + line.find(site.answer), site.answer)
    return SiteTokens(*(torch.tensor(sorted(set(each))) for each in (file, lines, names)))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
