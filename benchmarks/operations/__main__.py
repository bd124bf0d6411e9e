"""What observation costs: time per output token with traces and scrapes, and the scrapes themselves.

`python -m benchmarks.operations` starts a gateway and a worker twice, over the reference model: one
pair exports its traces to a collector in this process, one request in one, and has both metrics pages
read each second; the other does neither. Both answer the same streamed turns, one after the other and
in alternating order, so that disturbances of the machine affect both alike. The model's end of turn is
taken away: every answer has as many tokens as it may.

A row is the seconds per output token of one pair, from the first token's arrival to the last one's.
The third row is what the observed pair takes longer, turn by turn, as a share of the other's mean.
Then a pair with many sessions is scraped: the rows have the number of series.
"""

import argparse
import random
from pathlib import Path

from benchmarks.front_door import RESULTS, describe
from benchmarks.operations.scrapes import measure_scrapes
from benchmarks.operations.turns import measure_turns
from kvrecall.reporting.results import build_results


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=200, help="of each pair")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--sessions", type=int, default=10_000, help="while pages are scraped")
    parser.add_argument("--out", type=Path, default=RESULTS / "observability-overhead.json")
    given = parser.parse_args()
    rows = measure_turns(given.turns, given.tokens, random.Random(given.seed))
    rows += measure_scrapes(given.sessions)
    for row in rows:
        print(describe(row) if "metric" in row else row, flush=True)
    build_results("observability_overhead", given.seed, "reference", rows).write(given.out)


if __name__ == "__main__":
    main()
