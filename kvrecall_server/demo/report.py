"""The demo's report as one HTML page: a part for each model."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.client import Worker
from kvrecall_server.demo.configs import ALONE, DEFAULT, FULL, IN_TURNS
from kvrecall_server.demo.examples import add_examples, add_replies
from kvrecall_server.demo.plots import active_rows_plot, answers_plot, repairs_plot
from kvrecall_server.demo.run import DemoRun
from kvrecall_server.demo.second import SecondConversation, second_lines
from kvrecall_server.demo.summary import SUMMARY_NOTE, ConfigSummary, measures
from kvrecall_server.reporting.html import Page
from kvrecall_server.reporting.results import Results

_TURN_NOTE = (
    "Repair in turns runs before turns that are answered, on their messages, and such a turn waits "
    "for it. A wrong answer may be longer than a right one, and take longer. A session of the default "
    "names its budget alone: all of its rows are exact, and each step of an answer finds the stored rows "
    "that it needs, in a copy in host memory."
)


@dataclass(frozen=True)
class Part:
    """The runs of one model in all configurations; `worker` is the served model's description.

    `second` are the conversations after them. `about` says what the questions are, and which replies count as right.
    """

    title: str
    about: str
    runs: Sequence[DemoRun]
    second: Sequence[SecondConversation]
    summaries: Sequence[ConfigSummary]
    worker: Worker
    results: Results

    def runs_of(self, config: str) -> list[DemoRun]:
        """Runs in the configuration of this name."""
        return [run for run in self.runs if run.config.name == config]


def demo_page(parts: Sequence[Part]) -> Page:
    """The report on all parts."""
    page = Page("kvrecall demo: conversations longer than their budget")
    for part in parts:
        _add_part(page, part)
    for part in parts:
        _add_setup(page, part)
    return page


def _add_part(page: Page, part: Part) -> None:
    page.heading(part.title)
    page.paragraph(_headline(part.summaries), "lead")
    page.paragraph(f"{part.about} {_reserve_note(part.summaries)}", "note")
    page.table(
        ["", *(summary.config.name for summary in part.summaries)],
        [
            [name.strip(), *(cell(summary) for summary in part.summaries)]
            for name, cell in measures(part.summaries)
        ],
    )
    page.paragraph(f"{SUMMARY_NOTE}. {_TURN_NOTE}", "note")
    names = [summary.config.name for summary in part.summaries]
    page.subheading("A second conversation")
    page.paragraph(" ".join(second_lines(part.second)))
    add_examples(page, *(part.runs_of(name) for name in (FULL, ALONE, IN_TURNS)))
    add_replies(page, [part.runs_of(name) for name in names])
    _add_plots(page, part, names)


def _headline(summaries: Sequence[ConfigSummary]) -> str:
    named = {each.config.name: each for each in summaries}
    full, alone, repaired, default = (named[name] for name in (FULL, ALONE, IN_TURNS, DEFAULT))
    most = max(each.peak_rows for each in summaries if each.config.has_budget)
    return (
        f"The conversation has {full.tokens:,} tokens; the full cache kept all of their rows "
        f"active. Under a budget of {repaired.config.budget} rows no layer ever held more than "
        f"{most}. With the budget alone {_share(alone)} of the answers were right, with repair in "
        f"tool pauses and turns {_share(repaired)}, with the default, which recalls, "
        f"{_share(default)}, with the full cache {_share(full)}."
    )


def _share(summary: ConfigSummary) -> str:
    estimate = summary.exact["all"]
    return "none" if estimate is None else f"{estimate.mean:.0%}"


def _reserve_note(summaries: Sequence[ConfigSummary]) -> str:
    reserve = max(summary.config.repair_rows or 0 for summary in summaries)
    return (
        "All configurations with a budget have the same number of active rows: the "
        f"{reserve} rows reserved for repair are part of the budget. Questions are answered "
        "greedily, and the answers stay in the conversation; all other replies are appended as the "
        "generator wrote them, so that they are equal in every configuration."
    )


def _add_plots(page: Page, part: Part, names: Sequence[str]) -> None:
    first = [run for run in part.runs if run.seed == part.runs[0].seed]
    page.subheading("Active rows: bounded under a budget, growing without")
    bound = part.summaries[-1].config.budget + part.worker.block_tokens
    page.plot(active_rows_plot(first, bound), "active rows over the conversation")
    page.subheading("Answers by the age of the fact")
    page.plot(
        answers_plot([(name, part.runs_of(name)) for name in names]),
        "correct and wrong answers by the age of the fact, for every configuration",
    )
    page.subheading("Repair time per pause")
    page.paragraph(
        "A repair starts when a tool is called, with the call as its signal, and again when the "
        "result arrives. It runs while the session waits anyway. Here each turn waits for the "
        "repairs before it, so that the answers show the effect of complete repairs.",
    )
    page.plot(
        repairs_plot([run for run in first if run.config.repair_rows]), "repair time per pause"
    )


def _add_setup(page: Page, part: Part) -> None:
    page.subheading(f"Set-up: {part.results.model}")
    worker, results = part.worker, part.results
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
