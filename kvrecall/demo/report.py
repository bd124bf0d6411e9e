"""The demo's report as one HTML page."""

from collections.abc import Sequence

from kvrecall.client import Worker
from kvrecall.demo.plots import active_rows_plot, answers_plot, repairs_plot
from kvrecall.demo.run import DemoRun, Question
from kvrecall.demo.summary import ConfigSummary, measures
from kvrecall.reporting.html import Page
from kvrecall.reporting.results import Results

MAX_EXAMPLES = 8


def demo_page(
    runs: Sequence[DemoRun],
    summaries: Sequence[ConfigSummary],
    worker: Worker,
    results: Results,
) -> Page:
    """The report on the runs of all configurations; `worker` is the served model's description."""
    page = Page("kvrecall demo: a conversation longer than its budget")
    full = summaries[0]
    repaired = summaries[-1]
    budgeted = [summary for summary in summaries if summary.config.has_budget]
    page.paragraph(_headline(full, budgeted), "lead")
    page.paragraph(_caveat(summaries), "note")
    page.table(
        ["", *(summary.config.name for summary in summaries)],
        [
            [name.strip(), *(cell(summary) for summary in summaries)]
            for name, cell in measures(summaries)
        ],
    )
    page.paragraph(
        "Exact answers: share of n questions, 95% bootstrap interval. Seconds are medians.",
        "note",
    )
    _plots(page, runs, worker, repaired.config.budget)
    _examples(page, runs)
    _setup(page, worker, results)
    return page


def _headline(full: ConfigSummary, budgeted: Sequence[ConfigSummary]) -> str:
    alone = budgeted[0]
    repaired = budgeted[-1]
    return (
        f"The conversation has {full.tokens:,} tokens; the full cache kept all of their rows "
        f"active. Under a budget of {repaired.config.budget} rows no layer ever held more than "
        f"{max(s.peak_rows for s in budgeted)}. With the budget alone {_share(alone)} of the "
        f"answers were exact, with repair in tool pauses and turns {_share(repaired)}, with the "
        f"full cache {_share(full)}."
    )


def _share(summary: ConfigSummary) -> str:
    estimate = summary.exact["all"]
    return "none" if estimate is None else f"{estimate.mean:.0%}"


def _caveat(summaries: Sequence[ConfigSummary]) -> str:
    reserve = max(summary.config.repair_rows for summary in summaries)
    return (
        "All configurations with a budget have the same number of active rows: the "
        f"{reserve} rows reserved for repair are part of the budget. The model answers the "
        "questions greedily, and its answers stay in the conversation; all other replies are "
        "appended as the generator wrote them, so that they are equal in every configuration. "
        "Names and values were not in the training data. An answer counts if it gives exactly the "
        "value asked for; an answer that needs a tool counts only if the model called the tool."
    )


def _plots(page: Page, runs: Sequence[DemoRun], worker: Worker, budget: int) -> None:
    first = [run for run in runs if run.seed == runs[0].seed]
    names = list(dict.fromkeys(run.config.name for run in runs))
    page.heading("Active rows: bounded under a budget, growing without")
    page.plot(
        active_rows_plot(first, budget + worker.block_tokens),
        "active rows over the conversation",
    )
    page.heading("Answers by the age of the fact")
    page.plot(
        answers_plot([(name, [run for run in runs if run.config.name == name]) for name in names]),
        "correct and wrong answers by the age of the fact, for every configuration",
    )
    page.heading("Repair time per pause")
    page.paragraph(
        "A repair starts when the model calls a tool, with the call as its signal, and again when "
        "the result arrives. It runs while the session waits anyway. Here each turn waits for the "
        "repairs before it, so that the answers show the effect of complete repairs.",
    )
    page.plot(
        repairs_plot([run for run in first if run.config.repair_rows]), "repair time per pause"
    )


def _examples(page: Page, runs: Sequence[DemoRun]) -> None:
    """Table of questions that were answered with repair and not without."""
    alone = _questions(runs, "budget alone")
    repaired = _questions(runs, runs[-1].config.name)
    pairs = zip(alone, repaired, strict=True)
    saved = [(before, after) for before, after in pairs if after.correct and not before.correct]
    if not saved:
        return
    page.heading("Facts that repair promoted")
    page.paragraph(
        f"{len(saved)} questions were answered exactly with repair and not without it; "
        "those with the oldest facts:"
    )
    oldest = sorted(saved, key=lambda pair: -pair[1].age)[:MAX_EXAMPLES]
    page.table(
        ["question", "age, tokens", "without repair", "with repair"],
        [[after.text, f"{after.age:,}", before.reply, after.reply] for before, after in oldest],
        words=True,
    )


def _questions(runs: Sequence[DemoRun], name: str) -> list[Question]:
    return [question for run in runs if run.config.name == name for question in run.questions]


def _setup(page: Page, worker: Worker, results: Results) -> None:
    page.heading("Set-up")
    shape = f"{worker.layers} layers, {worker.kv_heads} KV heads of {worker.head_dim}"
    page.table(
        ["", ""],
        [
            ["model", f"{results.model} ({shape})"],
            ["machine", ", ".join(f"{name}: {value}" for name, value in results.machine.items())],
            ["versions", ", ".join(f"{name} {value}" for name, value in results.versions.items())],
            ["seed", str(results.seed)],
            ["block", f"{worker.block_tokens} tokens prefilled in one step"],
        ],
        words=True,
    )
    page.code(results.command)
