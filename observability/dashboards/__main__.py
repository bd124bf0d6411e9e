"""Write all dashboards to observability/grafana/dashboards/."""

from pathlib import Path

from observability.dashboards.boards import BOARDS
from observability.dashboards.grafana import render

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"


def main() -> None:
    """Write a file of each board."""
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(render(board), encoding="utf-8")


if __name__ == "__main__":
    main()
