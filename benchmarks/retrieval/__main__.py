"""What retrieval costs while decoding, beside a budget without it and beside the full cache.

`python -m benchmarks.retrieval answers` decodes with the packaged model after 4,096 and 15,872 tokens.
`python -m benchmarks.retrieval prompts` reads prompts of these lengths with `prefill.attend` = stored.
`python -m benchmarks.retrieval step` takes one layer of the shape of a 7B model with made-up rows, and
the time of its parts; `step --gpu` attends on a GPU, in bfloat16, with the rows on the host.
Result files go to `benchmarks/results/`.
"""

import argparse
from pathlib import Path

from benchmarks.retrieval import answers, prompts, step


def main() -> None:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for module in (answers, prompts, step):
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--out", type=Path, help="default: in benchmarks/results/")
        command.set_defaults(run=module.run)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
