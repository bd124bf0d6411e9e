"""A self-contained HTML page: text, tables and plots in one file."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  color: #1f2937; background: #f3f4f6; margin: 0; }
main { max-width: 960px; margin: 32px auto 64px; padding: 8px 40px 40px; background: #fff;
  border-radius: 10px;
  box-shadow: 0 1px 4px rgb(0 0 0 / .12); }
h1 { font-size: 28px; line-height: 1.25; margin: 28px 0 4px; }
h2 { font-size: 22px; margin: 44px 0 6px; }
h3 { font-size: 17px; margin: 32px 0 6px; }
p { margin: 6px 0 12px; }
.lead { font-size: 18px; }
.note { color: #6b7280; font-size: 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; margin: 10px 0; }
th, td { padding: 7px 10px; border-bottom: 1px solid #e5e7eb; text-align: right; vertical-align: top;
  white-space: pre-line; font-variant-numeric: tabular-nums; }
th { color: #374151; font-weight: 600; border-bottom: 2px solid #d1d5db; }
th:first-child, td:first-child, table.words th, table.words td { text-align: left; }
mark { background: none; } mark.right { color: #2f7d4a; } mark.wrong { color: #b4324a; }
mark.back { color: inherit; background: #d7f0df; border-radius: 3px; }
img { width: 100%; height: auto; display: block; }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; background: #f3f4f6; padding: 1px 5px;
  border-radius: 4px; overflow-wrap: anywhere; }
"""


class Html(str):
    """Text that is HTML already: of all that a page is given only this is not escaped."""

    __slots__ = ()


def marked(text: str, kind: str) -> Html:
    """Text that stands out; `kind` is `right`, `wrong` or, for what was brought back, `back`."""
    return Html(f'<mark class="{kind}">{escape(text)}</mark>')


def joined(*texts: str) -> Html:
    """Texts one after the other, escaped where they are not HTML."""
    return Html("".join(_to_html(text) for text in texts))


def _to_html(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


@dataclass
class Page:
    """A page whose parts appear in the order of the calls; text is escaped unless it is `Html`."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Add a section heading."""
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def subheading(self, text: str) -> None:
        """Add a heading within a section."""
        self.parts.append(f"<h3>{escape(text)}</h3>")

    def paragraph(self, text: str, kind: str = "") -> None:
        """Add a paragraph; `kind` is empty, `lead` or `note`."""
        self.parts.append(f'<p class="{kind}">{escape(text)}</p>')

    def code(self, text: str) -> None:
        """Add a line of code."""
        self.parts.append(f"<p><code>{escape(text)}</code></p>")

    def plot(self, svg: str, description: str) -> None:
        """Add a plot, given as SVG text."""
        data = b64encode(svg.encode()).decode()
        self.parts.append(
            f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}">'
        )

    def table(
        self, head: Sequence[str], lines: Sequence[Sequence[str]], *, words: bool = False
    ) -> None:
        """Add a table; with `words` all columns are left-aligned text, not numbers."""
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        rows = "".join(
            "<tr>" + "".join(f"<td>{_to_html(cell)}</td>" for cell in line) + "</tr>"
            for line in lines
        )
        kind = ' class="words"' if words else ""
        self.parts.append(f'<div class="scroll"><table{kind}><tr>{cells}</tr>{rows}</table></div>')

    def write(self, path: Path) -> None:
        """Write the page to a file; creates its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        title = escape(self.title)
        path.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style></head>"
            f"<body><main><h1>{title}</h1>{''.join(self.parts)}</main></body></html>\n",
            encoding="utf-8",
        )
