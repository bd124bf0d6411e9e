"""Findings about the ranks of a worker: each has other rows of the same pages, in tiers of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvrecall_server.admin.fsck import Finding, Stored, merge_reports
from kvrecall_server.app.rank_storage import Rank
from kvrecall_server.app.start.idle_rows import IdleRows
from kvstore.fsck import PagesReport


@dataclass(frozen=True)
class RankPages:
    """What one rank of a worker has stored, by the reports on its tiers: of rows, and of recurrent states."""

    rank: Rank
    rows: tuple[PagesReport, ...]
    states: tuple[PagesReport, ...]

    @property
    def reports(self) -> tuple[PagesReport, ...]:
        """All reports, fastest tier first; those on one of several ranks name it."""
        return tuple(_label(each, self.rank) for each in (*self.rows, *self.states))

    @property
    def pages(self) -> Stored:
        """The pages of rows in all tiers."""
        return merge_reports(self.rows)

    @property
    def kept_states(self) -> Stored:
        """The recurrent states in all tiers."""
        return merge_reports(self.states)

    def label(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Name this rank, where it is one of several, as the place of findings."""
        for each in findings:
            where = f"{each.where}, rank {self.rank.index}"
            yield replace(each, where=where) if self.rank.name else each


def idle_findings(idle: Iterable[IdleRows]) -> Iterator[Finding]:
    """Rows that the worker does not read."""
    for each in idle:
        yield Finding(each.names[0], each.what, each.advice, problem=False)


def _label(report: PagesReport, rank: Rank) -> PagesReport:
    if not rank.name:
        return report
    segments = tuple(replace(each, name=f"{rank.name}/{each.name}") for each in report.segments)
    return replace(report, tier=f"{report.tier} of rank {rank.index}", segments=segments)
