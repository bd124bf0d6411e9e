"""Pages for everybody: axe-core in both themes, the keyboard alone, small screens, less motion."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.served import Console

Open = Callable[..., Page]
PAGES = (
    "",
    "sessions",
    "sessions/SESSION",
    "sessions/SESSION?token=20&why=20",
    "sessions/SESSION/turns",
    "sessions/SESSION/repairs",
    "sessions/SESSION/episodes",
    "sessions/SESSION/forks",
    "workers",
    "methods",
    "playground",
    "playground?session=SESSION",
    "nothing",
)


def settle(page: Page) -> None:
    """Wait until everything that a page asked for is shown."""
    expect(page.locator("h1")).to_have_count(1)
    expect(page.get_by_text("Loading…")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing(
    served: Console,
    watched: Open,
    talk: str,
    check_access: Callable[[Page], None],
    path: str,
    theme: str,
) -> None:
    page = watched(served.page(path.replace("SESSION", talk)), color_scheme=theme)
    settle(page)
    check_access(page)


def test_axe_finds_nothing_in_an_open_dialog(
    served: Console, watched: Open, check_access: Callable[[Page], None]
) -> None:
    page = watched(served.page())
    page.get_by_role("button", name="Key: none").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check_access(page)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_fits_a_small_screen(served: Console, watched: Open, talk: str, path: str) -> None:
    page = watched(
        served.page(path.replace("SESSION", talk)), viewport={"width": 360, "height": 740}
    )
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_page_that_comes_late_leaves_the_focus_where_the_keyboard_put_it(
    served: Console, watched: Open
) -> None:
    page = watched(served.page())
    held: list[Route] = []
    page.route("**/settings.json", lambda route: held.append(route))
    page.reload(wait_until="commit")
    skip = page.get_by_role("link", name="To the content")
    expect(skip).to_be_attached()
    page.keyboard.press("Tab")
    expect(skip).to_be_focused()
    for route in held:
        route.continue_()
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    expect(skip).to_be_focused()


def test_the_keyboard_alone_goes_from_the_overview_to_the_reason_of_a_token(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.page())

    def press_until(name: str, limit: int = 60) -> None:
        for _ in range(limit):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "(document.activeElement.getAttribute('aria-label') ?? "
                "document.activeElement.textContent).trim()"
            )
            if re.fullmatch(name, focused):
                break
        else:
            raise AssertionError(f"no Tab leads to {name}")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"the focus on {name} is seen"

    press_until("To the content", 1)
    press_until("Sessions")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Sessions")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    expect(page.get_by_role("link", name=talk)).to_be_visible()
    press_until(talk)
    page.keyboard.press("Enter")
    expect(page.get_by_role("application")).to_be_visible()
    press_until(r"Memory map: \d+ layers by \d+ tokens")
    for key in ("+", "+", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    why = page.get_by_role("complementary", name="Why")
    expect(why).to_contain_text("reason")
    press_until("Conversation, token by token")
    position = int(re.findall(r"why=(\d+)", page.url)[0])
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(why).to_contain_text(f"Token {position + 1}")
    press_until("Close the explanation")
    page.keyboard.press("Enter")
    expect(why).to_contain_text("Choose a token")


def test_a_dialog_holds_the_focus_and_escape_closes_it(served: Console, watched: Open) -> None:
    page = watched(served.page())
    opener = page.get_by_role("button", name="Key: none")
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Key")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()


def test_a_chosen_theme_stays(served: Console, watched: Open) -> None:
    page = watched(served.page(), color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_label("Theme").select_option("Dark")
    assert page.evaluate(background) != light
    page.reload()
    expect(page.get_by_label("Theme")).to_have_value("dark")
    assert page.evaluate(background) != light


@pytest.mark.parametrize(("motion", "moves"), [("reduce", False), ("no-preference", True)])
def test_nothing_moves_for_who_asked_for_less_motion(
    served: Console, watched: Open, motion: str, moves: bool
) -> None:
    page = watched(served.page("workers"), reduced_motion=motion)
    bar = page.locator(".bar > span").first
    expect(bar).to_be_attached()
    lasts = bar.evaluate("element => getComputedStyle(element).transitionDuration")
    assert (lasts not in ("", "0s")) is moves
