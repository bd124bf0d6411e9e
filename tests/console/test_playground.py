"""The playground: the script from a stated fact to its answer, and a pause by hand."""

import json
import re
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page, expect

from gateway.console.mount import STATIC
from reference.tools import TOOLS
from tests.console.served import FACT, Console, find

Open = Callable[..., Page]


def next_step(page: Page, done: int) -> None:
    """Take a step of the script, and wait until it is done."""
    button = page.get_by_role("button", name="Next step")
    expect(button).to_be_enabled()
    button.click()
    expect(page.locator(".steps li.done")).to_have_count(done)


def session_of(page: Page) -> str:
    return parse_qs(urlsplit(page.url).query)["session"][0]


def test_the_script_lets_a_newcomer_see_forgetting_and_repair(
    served: Console, watched: Open
) -> None:
    page = watched(served.page("playground"))
    page.get_by_role("button", name="Step by step").click()
    for done in (1, 2, 3):
        next_step(page, done)
    session = session_of(page)
    fact = find(served.tokens(session), FACT)
    assert {token["reason"] for token in fact} == {"evicted"}
    shown = [page.locator(f'[data-position="{token["position"]}"]') for token in fact]
    for token in shown:
        expect(token).to_have_class(re.compile(r"\bevicted\b"))
    state = page.get_by_role("status").filter(has_text=FACT)
    expect(state).to_contain_text("is evicted: none of its")

    next_step(page, 4)
    expect(page.get_by_role("region", name="Pause", exact=True)).to_contain_text("on_call")
    next_step(page, 5)
    for token in shown:
        expect(token).to_have_class(re.compile(r"\bpromoted\b"))
        expect(token).not_to_have_class(re.compile(r"\bevicted\b"))
    expect(state).to_contain_text("brought back by a repair")
    span = {"start": fact[0]["position"], "stop": fact[-1]["position"] + 1}
    _, layers = served.map(session, **span)
    assert {byte for _, promoted in layers for byte in promoted} == {255}

    next_step(page, 6)
    expect(page.get_by_role("log").locator(".message").last).to_contain_text(FACT)
    expect(page.get_by_role("region", name="Comparison")).to_contain_text(
        "The answers are the same."
    )
    expect(page.get_by_role("region", name="Pause", exact=True)).to_have_count(0)


def test_the_script_goes_on_by_itself(served: Console, watched: Open) -> None:
    page = watched(served.page("playground"))
    page.get_by_role("button", name="Play the script").click()
    expect(page.locator(".steps li.done")).to_have_count(6)
    expect(page.get_by_role("log").locator(".message").last).to_contain_text(FACT)


def test_a_pause_by_hand_with_output_result_and_repairs(served: Console, watched: Open) -> None:
    page = watched(served.page("playground"))
    page.get_by_role("button", name="Full beside it").click()
    page.get_by_role("button", name="Create the session").click()
    message = page.get_by_role("textbox", name="Message")
    message.fill("Please note that the extension list says Melnor K4821.")
    message.press("Enter")
    log = page.get_by_role("log")
    expect(log.locator(".message.assistant")).to_have_count(1)
    expect(page.get_by_role("region", name="Comparison")).to_contain_text("answers")
    message.fill("Who is on call tonight, and what is their extension?")
    page.get_by_role("button", name="Send", exact=True).click()
    pause = page.get_by_role("region", name="Pause", exact=True)
    expect(pause).to_be_visible()
    expect(message).to_be_disabled()
    proceed = pause.get_by_role("button", name=re.compile("Wait for repairs"))
    expect(proceed).to_be_disabled()

    pause.get_by_role("button", name="Started").click()
    pause.get_by_role("textbox", name="Piece of output").fill("looking up the rota")
    pause.get_by_role("button", name="Send the piece").click()
    expect(pause.get_by_role("textbox", name="Piece of output")).to_have_value("")
    assert json.loads(pause.get_by_label("Result").input_value()) == {"person": "Melnor"}
    pause.get_by_role("button", name="Send the result").click()
    expect(pause.get_by_role("group", name="on_call completed")).to_be_visible()
    proceed.click()
    expect(pause).to_have_count(0)
    expect(log.locator(".message.tool")).to_contain_text("Melnor")
    expect(page.get_by_role("region", name="Comparison")).to_contain_text("Full cache")

    session = session_of(page)
    call = served.get(f"/v1/sessions/{session}/pauses")["pauses"][0]["calls"][0]
    assert (call["started"], call["output_pieces"], call["status"]) == (True, 1, "completed")


def test_a_failed_call_is_read_by_the_model_as_such(served: Console, watched: Open) -> None:
    page = watched(served.page("playground"))
    page.get_by_role("button", name="Create the session").click()
    page.get_by_role("textbox", name="Message").fill(
        "Who is on call tonight, and what is their extension?"
    )
    page.get_by_role("button", name="Send", exact=True).click()
    pause = page.get_by_role("region", name="Pause", exact=True)
    pause.get_by_label("Result").fill("the rota is closed")
    pause.get_by_role("button", name="Fail with it").click()
    pause.get_by_role("button", name="Next turn now").click()
    expect(page.get_by_role("log").locator(".message.tool")).to_contain_text("the rota is closed")
    pause = served.get(f"/v1/sessions/{session_of(page)}/pauses")["pauses"][-1]
    assert pause["calls"][0]["status"] == "failed"


def test_settings_are_those_of_the_schema_and_reach_the_session(
    served: Console, watched: Open
) -> None:
    page = watched(served.page("playground"))
    page.get_by_label("Method").select_option("snapkv")
    page.get_by_text("Settings of snapkv").click()
    page.get_by_label("window", exact=True).fill("16")
    page.get_by_label("Budget, rows").fill("200")
    page.get_by_label("turn", exact=True).check()
    page.get_by_role("button", name="Create the session").click()
    expect(page.get_by_role("log")).to_be_visible()
    session = served.get(f"/v1/sessions/{session_of(page)}")
    assert session["research"]["method_settings"] == {"window": 16}
    assert (session["recall"], session["budget"]) == (False, 200)
    assert "turn" in session["research"]["repair_on"]


def test_a_session_that_recalls_is_what_one_gets_first(served: Console, watched: Open) -> None:
    page = watched(served.page("playground"))
    expect(page.get_by_label("Of these for repair")).to_have_count(0)
    page.get_by_label("Budget, rows").fill("96")
    page.get_by_role("button", name="Create the session").click()
    expect(page.get_by_role("log")).to_be_visible()
    session = served.get(f"/v1/sessions/{session_of(page)}")
    assert (session["recall"], session["budget"]) == (True, 96)


def test_a_refused_setting_shows_what_is_wrong(served: Console, watched: Open) -> None:
    page = watched(served.page("playground"))
    page.get_by_label("Method").select_option("snapkv")
    page.get_by_label("Of these for repair").fill("1000")
    page.get_by_role("button", name="Create the session").click()
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("1000 rows kept for repair")
    expect(problem).to_contain_text("budget_out_of_range")
    expect(problem).to_contain_text("request")
    assert "session=" not in page.url


def test_the_tools_are_the_reference_models() -> None:
    text = (STATIC / "playground" / "tools.js").read_text(encoding="utf-8")
    pattern = r"name: '(\w+)', description: '([^']+)', argument: '(\w+)', result: '(\w+)'"
    own = [(tool.name, tool.description, tool.argument, tool.result) for tool in TOOLS]
    assert re.findall(pattern, text) == own
