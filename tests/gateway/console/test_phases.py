"""The phases of a turn in the console: all that a worker can report, each with a colour of its own."""

import re
from itertools import combinations, pairwise
from math import cbrt, dist

import pytest

from gateway.console.mount import STATIC
from kvrecall.domain.phases import Phase

Color = tuple[float, ...]
Matrix = tuple[tuple[float, float, float], ...]

# Linear RGB as eyes see it that have all cones, or lack those of one kind (Machado et al. 2009, severity 1).
SIGHTS: dict[str, Matrix] = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Oklab (Ottosson 2020), where a distance of 0.02 is just noticed.
TO_CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB: Matrix = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
LUMINANCE = (0.2126, 0.7152, 0.0722)


def multiply(matrix: Matrix, color: Color) -> Color:
    return tuple(
        sum(factor * part for factor, part in zip(row, color, strict=True)) for row in matrix
    )


def read_linear(text: str) -> Color:
    """Linear RGB, from 0 to 1, of `#rrggbb`."""
    parts = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )


def see(color: Color, sight: str) -> Color:
    """The colour in Oklab, as these eyes see it."""
    seen = tuple(min(1.0, max(0.0, part)) for part in multiply(SIGHTS[sight], color))
    return multiply(TO_LAB, tuple(cbrt(part) for part in multiply(TO_CONES, seen)))


def get_contrast(one: Color, other: Color) -> float:
    """WCAG's contrast, from 1 to 21."""
    darker, lighter = sorted(multiply((LUMINANCE,), color)[0] for color in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def read_pairs(sheet: str, prefix: str) -> dict[str, tuple[str, str]]:
    """Colours of the light and of the dark theme, by what follows the prefix of their name."""
    text = (STATIC / "styles" / sheet).read_text("utf-8")
    pattern = rf"--{prefix}([a-z_]+): light-dark\((#[0-9a-f]{{6}}), (#[0-9a-f]{{6}})\);"
    return {name: (light, dark) for name, light, dark in re.findall(pattern, text)}


def test_every_phase_that_a_turn_can_have_is_listed_in_the_order_of_time() -> None:
    text = (STATIC / "components" / "phases.js").read_text("utf-8")
    listed = re.search(r"const PHASES = \[(.*?)\];", text, re.DOTALL)
    assert listed
    assert re.findall(r"'(\w+)'", listed[1]) == [*Phase]


def test_every_phase_has_a_colour_of_its_own() -> None:
    assert [*read_pairs("phases.css", "phase-")] == [*Phase]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_differ_from_each_other_and_from_the_page(theme: int) -> None:
    page = read_linear(read_pairs("base.css", "")["bg"][theme])
    pairs = read_pairs("phases.css", "phase-").values()
    colors = [read_linear(pair[theme]) for pair in pairs]
    assert min(get_contrast(color, page) for color in colors) >= 3.0
    for sight in SIGHTS:
        seen = [see(color, sight) for color in colors]
        assert min(dist(*two) for two in combinations(seen, 2)) > 0.05, sight
        # Those that follow each other in a bar.
        assert min(dist(*two) for two in pairwise(seen)) > 0.1, sight
