"""Indexes over a layer's keys: seconds to build, to insert and to search, and what they find.

`python -m benchmarks.key_index reference` takes the reference model's keys of 4,096 to 16,128 rows
on a generated conversation, `smollm2 --data path/to/locomo` SmolLM2's of 4,096 rows, `made-up` keys
of 65,536 and 262,144 rows. Queries are those of the 256 tokens behind the rows, a GQA group at a
time. Times are CPU time of one thread, so that it can run beside other work. faiss is compared where
it is installed. `--layers` measures instead what adjacent layers find of one another's rows. Result
files go to `benchmarks/results/`.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.key_index.keys import (
    SOME_SMOLLM2_LAYERS,
    KeySet,
    made_up_keys,
    reference_keys,
    smollm2_keys,
)
from benchmarks.key_index.layers import measure_reuse
from benchmarks.key_index.measure import measure
from benchmarks.key_index.subjects import list_subjects
from benchmarks.throughput import RESULTS
from kvrecall.reporting.results import Row, build_results

ROWS = {"reference": (4096, 8192, 16_128), "smollm2": (4096,), "made-up": (65_536, 262_144)}


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", choices=ROWS)
    parser.add_argument("--rows", type=int, nargs="+", help="rows per head")
    parser.add_argument("--tokens", type=int, default=16, help="whose queries are searched")
    parser.add_argument("--data", type=Path, help="recordings, a file or a folder; for smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results/")
    parser.add_argument("--layers", action="store_true", help="compare adjacent layers' rows")
    given = parser.parse_args()
    if given.layers and given.keys == "made-up":
        parser.error("made-up keys have one layer")
    if given.keys == "smollm2" and not given.data:
        parser.error("smollm2 takes its text from --data")
    torch.set_num_threads(1)
    rows = []
    for row in measure_layers(given) if given.layers else measure_indexes(given):
        rows.append(row)
        print(row, flush=True)
    suite = "key-layers" if given.layers else "key-index"
    results = build_results(suite, given.seed, given.keys, rows)
    results.write(given.out or RESULTS / f"{suite}-{given.keys}.json")


def measure_indexes(given: argparse.Namespace) -> Iterator[Row]:
    """Rows of every index over every set of keys."""
    for keys in key_sets(given):
        for name, make in list_subjects().items():
            yield from measure(keys, name, make, given.seed)


def measure_layers(given: argparse.Namespace) -> Iterator[Row]:
    """Rows of adjacent layers, for every number of rows."""
    for keys in key_sets(given):
        yield from measure_reuse(keys, given.seed)


def key_sets(given: argparse.Namespace) -> Iterator[KeySet]:
    """Keys of every number of rows."""
    layers = None if given.layers else SOME_SMOLLM2_LAYERS
    make = {
        "reference": partial(reference_keys, tokens=given.tokens, seed=given.seed),
        "smollm2": partial(smollm2_keys, given.data, tokens=given.tokens, layers=layers),
        "made-up": partial(made_up_keys, tokens=given.tokens, seed=given.seed),
    }[given.keys]
    for rows in given.rows or ROWS[given.keys]:
        yield make(rows=rows)


if __name__ == "__main__":
    main()
