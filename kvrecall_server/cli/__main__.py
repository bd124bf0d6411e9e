"""Entry point of the `kvrecall` script and of `python -m kvrecall_server.cli`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from kvrecall_server.cli.extras import MissingLibraries, require_extra

# Names that an application may have as well.
PACKAGES = ("gateway", "services", "workers", "kvstore", "evals", "reference")


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
    if (foreign := find_foreign_package()) is not None:
        print(foreign, file=sys.stderr)
        sys.exit(2)
    # Imported after the checks: the commands need typer, which an install without extras does not have.
    from kvrecall_server.cli.commands import app

    app()


def find_foreign_package() -> str | None:
    """Explain which of the server's packages Python takes from another folder; None if none.

    Folders of an application's own (`services/`, `workers/`) hide the server's where PYTHONPATH or
    `python -m` puts them first.
    """
    home = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        spec = find_spec(name)
        found = [] if spec is None else list(spec.submodule_search_locations or ())
        if home / name not in (Path(each).resolve() for each in found):
            return (
                f"kvrecall needs its own package '{name}', and Python finds another at "
                f"{', '.join(found) or 'no folder'}: start the command `kvrecall` in another "
                "folder, and without that one in PYTHONPATH"
            )
    return None


if __name__ == "__main__":
    main()
