"""The memory map: its pixels are the API's cells, it zooms to single tokens, and says why."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kvrecall.client import KvrecallClient
from tests.console.served import FACT, ON_CALL, SMALL_TALK, Console, find

Open = Callable[..., Page]
Rgb = tuple[int, int, int]
GUTTER = 56
# The colours of pixels: in the middle of each column and layer, as painted.
READ_PIXELS = """([columns, layers, gutter]) => {
  const canvas = document.querySelector('.map canvas.cells');
  const height = canvas.clientHeight, width = canvas.clientWidth;
  const bands = height - layers * Math.max(6, Math.min(26, Math.floor(230 / layers)));
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const scale = canvas.width / width;
  return Array.from({length: layers}, (_, layer) => Array.from({length: columns}, (_, column) => {
    const x = gutter + (column + 0.5) * (width - gutter) / columns;
    const y = bands + (layer + 0.5) * (height - bands) / layers;
    return [...context.getImageData(Math.floor(x * scale), Math.floor(y * scale), 1, 1).data].slice(0, 3);
  }));
}"""
READ_COLORS = """() => ['--map-empty', '--map-active', '--map-promoted'].map(name => {
  const probe = document.body.appendChild(document.createElement('span'));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
})"""


def mix(active: int, promoted: int, colors: list[Rgb]) -> list[int]:
    """The colour of a cell as docs/how-to/console.md says it."""
    empty, held, back = colors
    share = active / 255
    lift = (min(1.0, promoted / active) ** 0.5) if active else 0.0
    if lift > 0:
        share = max(share, 0.5)
    tones = [h + (b - h) * lift for h, b in zip(held, back, strict=True)]
    return [round(e + (t - e) * share) for e, t in zip(empty, tones, strict=True)]


@pytest.fixture(scope="module")
def paused(served: Console) -> str:
    """A session in a pause, after its repair: it has promoted rows."""
    with KvrecallClient(served.url) as client:
        session = client.create_session(
            budget=256,
            research={"method": "snapkv", "repair_rows": 64},
            seed=1,
            tools=[ON_CALL],
            metadata={"kind": "paused"},
        ).id
        client.turn(session, f"Please note that the extension list says {FACT}.")
        client.turn(session, SMALL_TALK * 16, generate=False)
        turn = client.turn(session, "Who is on call tonight, and what is their extension?")
        for call in turn.tool_calls:
            client.event(session, "tool_call.completed", call.id, result='{"person": "Melnor"}')
        assert turn.tool_calls
    return session


def shown(page: Page) -> Any:
    """The map, when it is loaded."""
    found = page.get_by_role("application", name=re.compile("Memory map"))
    expect(found).to_be_visible()
    return found


def wait_for_promoted(served: Console, page: Page, session: str) -> None:
    expect(page.locator(".figures div", has_text="Brought back").locator("dd")).not_to_have_text(
        "0 tokens"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "view", [{}, {"start": 0, "stop": 90}, {"start": 10, "stop": 60, "head": 1}]
)
def test_every_cell_has_the_colour_of_the_apis_bytes(
    served: Console, watched: Open, paused: str, theme: str, view: dict[str, int]
) -> None:
    page = watched(served.session(paused, **view), color_scheme=theme)
    wait_for_promoted(served, page, paused)
    width = shown(page).evaluate("element => element.clientWidth") - GUTTER
    answer, layers = served.map(paused, **view, columns=min(2000, width))
    colors = [tuple(color) for color in page.evaluate(READ_COLORS)]
    columns = answer["columns"]
    expected = [
        [mix(active[column], promoted[column], colors) for column in range(columns)]
        for active, promoted in layers
    ]
    page.wait_for_function(
        "([expected, arguments]) => { const wrong = "
        f"({READ_PIXELS})(arguments).flat().filter((pixel, index) => "
        "pixel.some((value, i) => Math.abs(value - expected.flat()[index][i]) > 1)).length; "
        "window.wrongCells = wrong; return wrong === 0; }",
        arg=[expected, [columns, len(layers), GUTTER]],
    )
    kinds = {tuple(color) for row in expected for color in row}
    assert len(kinds) >= 3, "evicted, active and promoted cells are there"


def test_text_and_table_say_what_the_map_shows(served: Console, watched: Open, paused: str) -> None:
    page = watched(served.session(paused, start=0, stop=80))
    wait_for_promoted(served, page, paused)
    tokens = served.tokens(paused)
    for token in find(tokens, FACT):
        span = page.locator(f'[data-position="{token["position"]}"]')
        expect(span).to_have_text(token["text"], use_inner_text=False)
        expect(span).to_have_class(re.compile(r"\bpromoted\b"))
    evicted = next(token for token in tokens[:200] if token["rows"] == 0)
    expect(page.locator(f'[data-position="{evicted["position"]}"]')).to_have_class(
        re.compile(r"\bevicted\b")
    )
    page.get_by_text(re.compile("The map as a table")).click()
    rows = page.get_by_role("region", name="Runs of tokens").locator("tbody tr")
    numbers = [int(text) for text in rows.locator("td.number").all_inner_texts()]
    assert sum(numbers) == 80
    expect(rows.filter(has_text="brought back by repair").first).to_be_visible()
    expect(rows.filter(has_text="evicted in all layers").first).to_be_visible()


@pytest.mark.parametrize("kind", ["promoted", "evicted", "held"])
def test_a_token_says_why_by_click_and_by_address(
    served: Console, watched: Open, paused: str, kind: str
) -> None:
    page = watched(served.session(paused))
    wait_for_promoted(served, page, paused)
    wanted: dict[str, Callable[[Any], bool]] = {
        "promoted": lambda token: token["reason"] == "promoted",
        "evicted": lambda token: token["reason"] == "evicted",
        "held": lambda token: token["reason"] == "sink",
    }
    token = next(token for token in served.tokens(paused)[:200] if wanted[kind](token))
    page.locator(f'[data-position="{token["position"]}"]').click()
    why = page.get_by_role("complementary", name="Why")
    for text in (f"Token {token['position']}", token["detail"], f"{token['rows']} of"):
        expect(why).to_contain_text(text)
    cells = why.locator("table.heads td")
    expect(cells.filter(has_not_text="–")).to_have_count(token["rows"])
    expect(page).to_have_url(re.compile(f"why={token['position']}"))
    page.reload()
    expect(why).to_contain_text(token["detail"])
    if kind == "promoted":
        why.get_by_role("link", name=f"repair {token['repair']}").first.click()
        expect(page.get_by_text(f"{token['repair']} (chosen)")).to_be_visible()


def test_zoom_by_keys_and_by_drag_ends_at_single_tokens(
    served: Console, watched: Open, paused: str
) -> None:
    page = watched(served.session(paused))
    map_ = shown(page)
    length = served.map(paused)[0]["length"]
    line = page.locator("#map-line")
    expect(line).to_have_text(f"Tokens 0 to {length - 1} of {length}")
    box = map_.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + GUTTER + 100, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + GUTTER + 300, middle, steps=4)
    page.mouse.up()
    page.mouse.move(5, 5)
    expect(line).not_to_have_text(re.compile("Tokens 0 to"))
    map_.focus()
    for _ in range(8):
        page.keyboard.press("+")
    expect(page.get_by_role("button", name="Zoom in")).to_be_disabled()
    expect(line).to_have_text(re.compile(r"^Tokens (\d+) to (\d+) of"))
    numbers = re.match(r"Tokens (\d+) to (\d+)", line.inner_text())
    assert numbers is not None
    assert int(numbers[2]) - int(numbers[1]) + 1 == 16
    page.keyboard.press("ArrowRight")
    expect(line).to_have_text(re.compile(r"^token \d+, over all layers"))
    page.keyboard.press("ArrowDown")
    expect(line).to_have_text(re.compile(r"^token \d+, layer 0"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="Why")).to_contain_text("reason")
    page.keyboard.press("0")
    expect(page.get_by_role("button", name="Zoom out")).to_be_disabled()
    page.keyboard.press("End")
    expect(line).to_contain_text(str(length - 1))


def test_a_head_is_chosen_and_kept_in_the_address(
    served: Console, watched: Open, paused: str
) -> None:
    page = watched(served.session(paused))
    page.get_by_label("Heads").select_option("head 1")
    page.wait_for_url(re.compile("head=1"))
    page.reload()
    expect(page.get_by_label("Heads")).to_have_value("1")


def test_a_range_that_is_not_there_says_so_and_leads_back(
    served: Console, watched: Open, paused: str
) -> None:
    page = watched(served.session(paused, start=90000, stop=10))
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("invalid_request")
    problem.get_by_role("button", name="Try again").click()
    expect(shown(page)).to_be_visible()
    expect(problem).to_have_count(0)


def test_a_session_without_tokens_is_empty_and_fills_while_it_is_looked_at(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session(budget=128, seed=4).id
    page = watched(served.session(session))
    expect(page.get_by_text("The session has no tokens yet")).to_be_visible()
    client.turn(session, "Please note that the extension list says Melnor K4821.", max_tokens=8)
    expect(page.locator(".tk").first).to_be_visible()
    expect(page.locator(".tokens")).to_contain_text(FACT)


def test_a_long_session_asks_for_as_many_cells_and_draws_what_is_near(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session(
        budget=64, research={"repair_rows": 0, "method": "streaming_llm"}, seed=4
    ).id
    for _ in range(6):
        client.turn(session, SMALL_TALK * 30, generate=False)
    length = client.get_session(session).length
    assert length > 8000
    page = watched(served.session(session))
    expect(page.locator(".chunk")).to_have_count(-(-length // 256))
    expect(page.locator(".tk").first).to_be_visible()
    assert page.locator(".tk").count() < 4000
    # Heights are known when the text is there, so that the end moves until then.
    page.wait_for_function(
        """position => {
          const box = document.querySelector('.tokens');
          box.scrollTop = box.scrollHeight;
          return document.querySelector(`[data-position="${position}"]`) !== null;
        }""",
        arg=length - 1,
    )
    assert page.locator('[data-position="0"]').count() == 0, "what is far away is let go"
