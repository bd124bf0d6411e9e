"""What mq-niah comes to: scores by condition and K, gains over matched no-repair, spans, seconds."""

from collections.abc import Iterator, Sequence

from evals.suite import Record
from kvrecall.cli.results import Row


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    return []
