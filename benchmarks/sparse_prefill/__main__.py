"""Sparse prefill beside the exact one: its speed on one block, and a model's fidelity with it.

`python -m benchmarks.sparse_prefill speed` takes the heads of a small model, a block of 512 tokens and
16,384 rows, in which vertical lines of 10% and of 25% of the rows hold the weight. `speed --gpu` takes
the heads of Qwen2.5-7B in bfloat16 on a GPU, 8,192 to 65,536 rows, and blocks of 512 to 2,048 tokens.
`python -m benchmarks.sparse_prefill fidelity --data path/to/locomo` compares SmolLM2's distributions.
Result files go to `benchmarks/results/`.
"""

import argparse
from pathlib import Path

from benchmarks.sparse_prefill import fidelity, speed


def main() -> None:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for module in (speed, fidelity):
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--out", type=Path, help="default: in benchmarks/results/")
        command.set_defaults(run=module.run)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
