"""Entry point of the `kvrecall` script and of `python -m kvrecall_server.cli`."""

import os
import sys

from kvrecall_server.cli.extras import MissingLibraries, require_extra


def main() -> None:
    """Run the command line; exit with 2 where the command's extra is not installed."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        require_extra(command)
    except MissingLibraries as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if not sys.stderr.isatty():
        # Read when tqdm is imported, for transformers' progress bars: they have no place in a log.
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Imported after the check: the commands need typer, which the base install does not have.
    from kvrecall_server.cli.commands import app

    app()


if __name__ == "__main__":
    main()
