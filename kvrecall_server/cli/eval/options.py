"""Options that the commands of `kvrecall eval` share."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

# Of the first conversation, unless a suite has its own.
SEED = 9000

Json = Annotated[
    Path,
    typer.Option("--json", help="Result file to write, with a journal and a plot beside it."),
]
Model = Annotated[
    str, typer.Option(help="Causal LM, by path or hub name; `reference`: the packaged one.")
]
Processes = Annotated[
    int, typer.Option(min=1, help="Parallel processes; results do not depend on it.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Discard the journal and run everything again.")
]
Limit = Annotated[
    int, typer.Option(min=0, help="Recordings per source; 0: all, or 4 generated ones.")
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        help=escape(
            "METHOD[+one_pass|+per_episode|+none][/MEDOIDS][@uniform|@pyramid|@sensitivity]"
            '[^stored|^active][~RETRIEVED][{"setting":value}]; several: separated by spaces, or repeat the option. '
            "Default: all."
        )
    ),
]
Budget = Annotated[str, typer.Option(help="Rows per head.")]
Budgets = Annotated[
    list[str] | None,
    typer.Option(help="Rows per head, or shares of the history (1/8); several as in --methods."),
]
Chunks = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        help="Tokens of a chunk of positions behind the model's window; repeatable. 0: the default.",
    ),
]
Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec",
        help='Codec of stored rows: raw, int8, or "raw int8" to compare. Default: raw.',
    ),
]
Conditions = Annotated[
    list[str] | None,
    typer.Option(
        "--condition", help="Condition to run beside the full cache; repeatable. Default: all."
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="Recordings for real text (LoCoMo, tau-bench, SWE-agent, JSON lines): a file or a "
        "folder; repeatable. Default: generated text."
    ),
]
Block = Annotated[int, typer.Option(min=1, help="Tokens prefilled in one step.")]
Episodes = Annotated[str, typer.Option(help="Episodes per conversation: a number, or auto.")]
Ks = Annotated[
    list[int] | None, typer.Option("--k", min=1, help="Restore budget K, in rows; repeatable.")
]
