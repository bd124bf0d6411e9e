"""The demo's report: one HTML page."""

from collections.abc import Sequence

from kvrecall.client import Worker
from kvrecall.demo.arms import ArmRun, Question
from kvrecall.demo.plots import active_rows_plot, answers_plot, repairs_plot
from kvrecall.demo.summary import ArmSummary
from kvrecall.demo.table import measures
from kvrecall.reporting.html import Page
from kvrecall.reporting.results import Results

MOST_EXAMPLES = 8


def demo_page(
    runs: Sequence[ArmRun],
    summaries: Sequence[ArmSummary],
    worker: Worker,
    results: Results,
) -> Page:
    """The page for the runs of all arms."""
    page = Page("kvrecall demo: a conversation that does not fit, remembered")
    full = summaries[0]
    repaired = summaries[-1]
    budgeted = [summary for summary in summaries if summary.arm.has_budget]
    page.paragraph(_headline(full, budgeted), "lead")
    page.paragraph(_caveat(summaries), "note")
    page.table(
        ["", *(summary.arm.name for summary in summaries)],
        [
            [name.strip(), *(cell(summary) for summary in summaries)]
            for name, cell in measures(summaries)
        ],
    )
    page.paragraph(
        "Exact answers: share of n questions and its 95% bootstrap interval. Seconds are medians.",
        "note",
    )
    _plots(page, runs, worker, repaired.arm.budget)
    _examples(page, runs)
    _how(page, worker, results)
    return page


def _headline(full: ArmSummary, budgeted: Sequence[ArmSummary]) -> str:
    alone = budgeted[0]
    repaired = budgeted[-1]
    return (
        f"{full.tokens:,} tokens were said, and the full cache ended with all of them in memory. Under a budget of "
        f"{repaired.arm.budget} rows no layer ever held more than {max(s.peak_rows for s in budgeted)}. The model "
        f"then gave {_share(alone)} of its answers exactly, {_share(repaired)} when evicted rows were brought back "
        f"in tool pauses and at turns; with the full cache it gave {_share(full)}."
    )


def _share(summary: ArmSummary) -> str:
    estimate = summary.exact["all"]
    return "none" if estimate is None else f"{estimate.mean:.0%}"


def _caveat(summaries: Sequence[ArmSummary]) -> str:
    reserve = max(summary.arm.repair_rows for summary in summaries)
    return (
        f"All budgeted arms may hold the same number of active rows: the {reserve} rows that a repair may bring back "
        "are part of the budget. Questions are answered by the model, greedily, and its answers stay in the "
        "conversation; all other replies are remembered as the generator wrote them, so that every arm hears the "
        "same. The names and values were never seen in training. An answer counts when it gives exactly the value "
        "asked for; one after a tool only if the model itself asked for the tool."
    )


def _plots(page: Page, runs: Sequence[ArmRun], worker: Worker, budget: int) -> None:
    first = [run for run in runs if run.seed == runs[0].seed]
    names = list(dict.fromkeys(run.arm.name for run in runs))
    page.heading("Active rows: flat under a budget, growing without")
    page.plot(
        active_rows_plot(first, budget + worker.block_tokens),
        "active rows over the conversation",
    )
    page.heading("Answers by the age of the fact")
    page.plot(
        answers_plot([(name, [run for run in runs if run.arm.name == name]) for name in names]),
        "right and wrong answers by the age of the fact, for every arm",
    )
    page.heading("Repair time per pause")
    page.paragraph(
        "A repair begins when the model asks for the tool, with the call as its signal, and once more when the "
        "result is there. It runs while the conversation waits anyway; here each turn lets the repairs before it end, "
        "so that the answers say what repair finds.",
    )
    page.plot(repairs_plot([run for run in first if run.arm.repair_rows]), "repair time per pause")


def _examples(page: Page, runs: Sequence[ArmRun]) -> None:
    """Questions that only the repaired session answered."""
    alone = _arm_questions(runs, "budget alone")
    repaired = _arm_questions(runs, runs[-1].arm.name)
    pairs = zip(alone, repaired, strict=True)
    saved = [(before, after) for before, after in pairs if after.right and not before.right]
    if not saved:
        return
    page.heading("Facts that repair brought back")
    page.paragraph(
        f"{len(saved)} questions were answered with repair and not without; the oldest facts among them:"
    )
    oldest = sorted(saved, key=lambda pair: -pair[1].age)[:MOST_EXAMPLES]
    page.table(
        ["question", "said, tokens ago", "without repair", "with repair"],
        [[after.asked, f"{after.age:,}", before.reply, after.reply] for before, after in oldest],
        words=True,
    )


def _arm_questions(runs: Sequence[ArmRun], name: str) -> list[Question]:
    return [question for run in runs if run.arm.name == name for question in run.questions]


def _how(page: Page, worker: Worker, results: Results) -> None:
    page.heading("How this was measured")
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
