"""Suite repository: a name that was taken out of a place in the code (RepairKV 5.5, Table 2, Figure 6).

Several modules are read; the first turn asks about one that has nothing to do with it; then an event describes a call
whose name is missing. A repair sees the event alone; every condition answers the same event and question.

The reference model was never trained on code: with it, what is brought back says something, the answers do not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from evals import harness, selectors
from evals.compressed import Compressed
from evals.conditions import (
    BASE,
    CONDITIONS,
    FULL,
    MATCHED,
    OLDEST,
    RANDOM,
    REPAIR,
    SPREAD,
    STALE,
    WRONG,
    Before,
    Held,
    before,
)
from evals.configs import rows_of
from evals.harness import Message
from evals.replay_session import replaying
from evals.spans import laid_out, touched
from evals.suite import Record, Suite
from evals.suites.repository.examples import CallSite, call_site, other_event
from evals.summary import Key, difference_row, grouped, mean, mean_row, values_of
from kvrecall.reporting.results import Row, speed_row

PAPERS_CONTEXT = 32768
PAPERS_KS = (96, 192)
BASE_SHARE = "1/4"
TOOL_FILE = "ToolFile-K"
GATED = "ours, file-gated"
ANCHOR = "AnchorWindow-K"
CONTROL = "best non-query control"
CONTROLS = (RANDOM, OLDEST, STALE, WRONG)
COMPARED = (FULL, BASE, MATCHED, *CONTROLS, TOOL_FILE, REPAIR, SPREAD, GATED, ANCHOR)
_BLOCK_TOKENS = 512
_ROOM = 512
_MOST_TOKENS = 24


@dataclass(frozen=True)
class CodeCase:
    """One call site under all conditions. `tokens`: of the context."""

    model: str
    seed: int
    tokens: int
    ks: tuple[int, ...]
    base: str = BASE_SHARE

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"call site, seed {self.seed}"


@dataclass(frozen=True)
class Places:
    """Where things stand in the context: tokens, int64. `lines`: of the call and of the definition."""

    file: Tensor
    lines: Tensor
    names: Tensor = field(repr=False)


def suite(model: str, tokens: int, seed: int, cases: int) -> Suite[CodeCase]:
    """So many call sites; K as large a share of the context as in the paper."""
    ks = tuple(max(1, round(k * tokens / PAPERS_CONTEXT)) for k in PAPERS_KS)
    units = tuple(CodeCase(model, one, tokens, ks) for one in range(seed, seed + cases))
    return Suite("repository", seed, model, units, run, partial(result_rows, seed=seed))


def context_tokens(model: str) -> int:
    """The paper's context, or half of what the model can read."""
    return min(PAPERS_CONTEXT, harness.loaded(model).model.max_context // 2)


def run(unit: CodeCase) -> list[Record]:
    """Read, answer the first turn, compress; then every condition. Raises BadExample, BadBudget, `workers.errors`."""
    tokenizer = harness.loaded(unit.model).tokenizer

    def length_of(text: str) -> int:
        return len(tokenizer.encode(text))

    site = call_site(unit.seed, unit.tokens, length_of)
    donor = _user(other_event(unit.seed, site))
    rows = harness.tokens_of(tokenizer, site.context()) + _ROOM
    with replaying(
        unit.model, "snapkv", unit.seed, rows=rows, block_tokens=_BLOCK_TOKENS
    ) as replayed:
        said = replayed.say(site.context())
        context = replayed.state.length
        observed = replayed.reply(site.first_question, _MOST_TOKENS).observed
        scores = replayed.first_stage(observed, context)
        cache = Compressed(replayed, context, context, rows_of(unit.base, context), scores)
        signals = (_user(site.event), _user(site.first_question), donor)
        ready = before(cache, *signals, seed=f"repository:{unit.seed}")
        found = _places(site, *laid_out(tokenizer, said[:context]))
        return list(_conditions(unit, site, ready, found))


def _conditions(unit: CodeCase, site: CallSite, ready: Before, found: Places) -> Iterator[Record]:
    for k in unit.ks:
        for name in COMPARED:
            if name in (FULL, BASE) and k != unit.ks[0]:
                continue
            held = (
                _LABELLED[name](ready, k, found)
                if name in _LABELLED
                else CONDITIONS[name](ready, k)
            )
            told = {"seed": unit.seed, "condition": name, "k": 0 if name in (FULL, BASE) else k}
            yield {"kind": "call site", **told, **_asked(site, ready, held, found)}


def _asked(site: CallSite, ready: Before, held: Held, found: Places) -> dict[str, Any]:
    cache = ready.cache
    messages = [_user(f"{site.event}\n{site.question}")]
    tokens = cache.held_of_context(held.state)
    brought = tokens[~torch.isin(tokens, ready.base)]
    reply = cache.replayed.ask(held.state, messages, _MOST_TOKENS)
    return {
        "expected": site.answer,
        "reply": reply,
        "right": float(site.is_answered_by(reply)),
        "log_prob": cache.replayed.log_prob(held.state, messages, site.answer),
        "held": float(torch.isin(found.names, tokens).float().mean()),
        "in_lines": float(torch.isin(brought, found.lines).float().mean()) if len(brought) else 0.0,
        "context": cache.context,
        "budget": held.budget,
        "active_rows": cache.rows_of(held.state, held.budget),
        "seconds": held.report.seconds if held.report else 0.0,
    }


def _tool_file(ready: Before, k: int, found: Places) -> Held:
    """Evicted rows of the file that the event names, the oldest first, then the oldest of all."""
    inside = torch.isin(ready.candidates, found.file)
    order = torch.cat([ready.candidates[inside], ready.candidates[~inside]])
    return ready.with_tokens(order[:k])


def _gated(ready: Before, k: int, found: Places) -> Held:
    """Ours among the rows of the file that the event names."""
    scores = ready.signal_scores(torch.arange(ready.cache.context))
    inside = ready.candidates[torch.isin(ready.candidates, found.file)]
    return ready.with_tokens(selectors.best_spread(scores, inside, ready.cache.scores, k))


def _anchor(ready: Before, k: int, found: Places) -> Held:
    """The evicted rows nearest to where the name stands: it knows the answer's place."""
    return ready.with_tokens(selectors.nearest(ready.candidates, found.names.tolist(), k))


_LABELLED: Mapping[str, Callable[[Before, int, Places], Held]] = MappingProxyType(
    {TOOL_FILE: _tool_file, GATED: _gated, ANCHOR: _anchor}
)


def _places(site: CallSite, text: str, starts: Sequence[int]) -> Places:
    """Where the calling file, the lines of call and definition, and the name in them stand."""
    file = touched(starts, text.find(site.calling.listing), site.calling.listing)
    lines = list[int]()
    names = list[int]()
    for module, number in ((site.calling, site.call.line), (site.defining, site.defined_on)):
        line = module.line(number)
        at = text.find(f"\n{line}\n", text.find(module.listing)) + 1
        lines += touched(starts, at, line)
        names += touched(starts, at + line.find(site.answer), site.answer)
    return Places(*(torch.tensor(sorted(set(each))) for each in (file, lines, names)))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Exact recovery by condition and K, gains, log-probabilities, where what came back stands; seconds."""
    groups = grouped(records, "condition", "k")
    rows: list[Row] = []
    for key, found in groups.items():
        rows += mean_row(key[0], [each["right"] for each in found], seed, **_common(key, found))
    rows += _best_control(groups, seed)
    for name, told in (
        ("log_prob", "log-probability of the name, nats a token"),
        ("held", "the name's rows active"),
        ("in_lines", "came back from the call's or definition's line"),
    ):
        for key, found in groups.items():
            values = [each[name] for each in found]
            rows += mean_row(f"{key[0]}: {told}", values, seed, **_common(key, found), measure=told)
    rows += _gains(groups, seed)
    for (condition,), found in grouped(
        [each for each in records if each["seconds"]], "condition"
    ).items():
        rows.append(speed_row(condition, "repair", "seconds", [each["seconds"] for each in found]))
    return rows


def _common(key: Key, found: Sequence[Record]) -> dict[str, Any]:
    return {
        "method": "snapkv",
        "k": key[1],
        "budget": round(mean(each["budget"] for each in found)),
        "active_rows": round(mean(each["active_rows"] for each in found), 1),
        "of": key[0],
    }


def _best_control(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    """Of the four controls the one with the highest mean at each K (Table 2)."""
    for k in dict.fromkeys(key[1] for key in groups if key[1]):
        named = {name: groups[name, k] for name in CONTROLS}
        best = max(named, key=lambda name: mean(each["right"] for each in named[name]))
        told = {**_common((CONTROL, k), named[best]), "control": best}
        yield from mean_row(CONTROL, [each["right"] for each in named[best]], seed, **told)


def _gains(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    for (condition, k), found in groups.items():
        theirs = groups.get((MATCHED, k))
        if condition in (FULL, BASE, MATCHED) or theirs is None:
            continue
        told = {**_common((condition, k), found), "against": MATCHED}
        pair = [
            values_of(each, lambda one: float(one["right"]), "seed") for each in (found, theirs)
        ]
        yield from difference_row(f"{condition} minus matched", pair[0], pair[1], seed, **told)
