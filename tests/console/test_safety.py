"""What the console must never do: run what a conversation says, keep a key, or ask elsewhere."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, expect

from kvrecall.client import KvrecallClient
from tests.console.served import ON_CALL, Console
from tests.end_to_end.servers import until

Open = Callable[..., Page]
KEY = "a-key-of-the-test-0123456789"
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>",
    "javascript:document.title='owned' \" onclick=\"document.title='owned'\" '>",
    "\u202eevil\u202c \u2066\u2067 right to left \u05d0\u05d1\u05d2 \u0627\u0644",
    "\u0301\u0301\u0301 lone marks " + "e" + "\u0301" * 500,
    "\x00\x07\ufffd\ufeff\U0010ffff \U0001f469\u200d\U0001f680",
    "W" * 3000,
)


@pytest.fixture(scope="module")
def hostile(served: Console) -> str:
    """A session whose messages, tools, calls, results and metadata are hostile."""
    markup = HOSTILE[0]
    with KvrecallClient(served.url) as client:
        tool = {"type": "function", "function": {**ON_CALL["function"], "description": markup}}
        session = client.create_session(
            budget=256,
            research={"method": "snapkv", "repair_rows": 32},
            tools=[tool],
            metadata={"hostile": markup[:60]},
            seed=1,
        ).id
        for text in HOSTILE:
            client.turn(session, text, max_tokens=4)
        call = {"id": "<b>c1</b>", "function": {"name": "<i>x</i>", "arguments": "{}"}}
        recorded = {"role": "assistant", "content": markup, "tool_calls": [call]}
        client.turn(session, [recorded], generate=False)
        client.event(session, "tool_call.delta", "<b>c1</b>", delta=markup)
        client.event(session, "tool_call.completed", "<b>c1</b>", result=markup)
        until(lambda: len(client.repairs(session)) > 0, "a repair on the result")
        return session


@pytest.mark.parametrize("page_name", ["", "turns", "repairs", "episodes", "forks"])
def test_hostile_text_is_text(served: Console, watched: Open, hostile: str, page_name: str) -> None:
    page = watched(served.session(hostile, page_name))
    expect(page.locator("h1")).to_be_visible()
    expect(page.get_by_text("Loading…")).to_have_count(0)
    if page_name == "turns":
        expect(page.get_by_text(HOSTILE[0]).first).to_be_visible()
        expect(page.get_by_text("<i>x</i>").first).to_be_visible()
    if page_name == "":
        expect(page.locator(".tk").first).to_be_visible()
    # The title is set after the page is drawn; a script of the session's would set another.
    expect(page).to_have_title(re.compile("· kvrecall$"))
    expect(page.locator("main img, main script, main i, main b")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_hostile_text_is_text_in_the_lists_and_the_playground(
    served: Console, watched: Open, hostile: str
) -> None:
    page = watched(served.page("sessions", q="hostile"))
    expect(page.get_by_role("link", name=hostile)).to_be_visible()
    expect(page.get_by_role("row").last).to_contain_text("<img src=x")
    page = watched(served.page("playground", session=hostile))
    expect(page.get_by_role("log")).to_contain_text("<script>")
    expect(page.get_by_role("region", name="Pause", exact=True)).to_contain_text("<i>x</i>")
    expect(page).to_have_title("Playground · kvrecall")


def test_hostile_addresses_are_pages_that_are_not_there(served: Console, watched: Open) -> None:
    for path in (
        "%3Cimg%20src=x%3E",
        "sessions/%3Cscript%3E",
        "sessions/%E0%A4%A",
        "sessions/a/b/c",
    ):
        page = watched(served.page(path))
        expect(page.locator("h1")).to_have_count(1)
        expect(page.locator("main")).to_contain_text(re.compile("There is nothing|unknown_"))


def test_the_policy_stops_what_is_not_the_consoles_own(served: Console, browser: Browser) -> None:
    # And so the watch over all other tests sees what it is there for.
    with browser.new_context() as context:
        page = context.new_page()
        seen: list[str] = []
        page.add_init_script(
            "addEventListener('securitypolicyviolation', e => "
            "console.error('violates', e.violatedDirective))"
        )
        page.on("console", lambda message: seen.append(message.text))
        page.goto(served.page())
        page.evaluate(
            "() => { const script = document.createElement('script');"
            " script.append('window.ran = 1'); document.body.append(script);"
            " try { document.body.innerHTML = '<p>' } catch (error) { console.error(String(error)) }"
            " new Image().src = 'http://127.0.0.1:1/image';"
            " return fetch('http://127.0.0.1:1/').catch(() => null) }"
        )
        assert page.evaluate("window.ran") is None
        text = "\n".join(seen)
        for directive in ("img-src", "connect-src", "require-trusted-types-for"):
            assert f"violates {directive}" in text, text


def test_a_key_is_asked_for_and_kept_in_this_tab_only(
    new_console: Callable[..., Console], watched: Open
) -> None:
    keyed = new_console(KVRECALL_API_KEY=KEY)
    with KvrecallClient(keyed.url, api_key=KEY) as client:
        session = client.create_session(budget=64, seed=1).id
        page = watched(keyed.page("sessions"))
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        expect(page.get_by_role("alert").first).to_contain_text("invalid_api_key")
        dialog.get_by_label("Key").fill(KEY)
        dialog.get_by_role("button", name="Use it").click()
        expect(page.get_by_role("link", name=session)).to_be_visible()
        page.get_by_role("link", name=session).click()
        expect(page.get_by_text("live", exact=True)).to_be_visible()  # the stream has it too
        client.turn(session, "Hello.", max_tokens=2)
        expect(page.locator(".tk").first).to_be_visible()
    stored = "JSON.stringify([{...localStorage}, document.cookie, location.href])"
    assert KEY not in page.evaluate(stored)
    assert KEY in page.evaluate("JSON.stringify({...sessionStorage})")
    other = page.context.new_page()
    other.goto(keyed.page("sessions"))
    expect(other.get_by_role("dialog", name="API key")).to_be_visible()
    page.get_by_role("button", name="Key: set").click()
    page.get_by_role("button", name="Forget it").click()
    assert KEY not in page.evaluate("JSON.stringify({...sessionStorage})")


def test_a_read_only_console_hides_what_changes_sessions(
    new_console: Callable[..., Console], watched: Open
) -> None:
    console = new_console(KVRECALL_GATEWAY__CONSOLE_READ_ONLY="true")
    with KvrecallClient(console.url) as client:
        session = client.create_session(budget=64, seed=1).id
    for path in ("", "sessions", "workers", f"sessions/{session}/forks"):
        page = watched(console.page(path))
        expect(page.get_by_text("Loading…")).to_have_count(0)
        expect(page.locator("h1")).to_be_visible()
        expect(page.get_by_role("link", name=re.compile("playground", re.I))).to_have_count(0)
        expect(page.get_by_role("button", name=re.compile("Fork|Move"))).to_have_count(0)
    page = watched(console.page("playground"))
    expect(page.get_by_role("heading", level=1)).to_have_text("No such page")


def test_a_page_lives_on_after_a_restart_of_the_service(
    new_console: Callable[..., Console], watched: Open
) -> None:
    console = new_console()
    with KvrecallClient(console.url) as client:
        session = client.create_session(budget=64, seed=1).id
        client.turn(session, "Hello.", max_tokens=2)
    page = watched(console.session(session))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.get_by_text("Loading…")).to_have_count(0)
    console.kill()
    expect(page.get_by_text("connection lost; shown is the state of")).to_be_visible()
    console.process.start()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    with KvrecallClient(console.url) as client:
        client.turn(session, "Hello again.", max_tokens=2)
    expect(page.locator(".figures div", has_text="Turns").locator("dd").first).to_have_text("2")


def test_two_tabs_share_one_stream(served: Console, watched: Open, client: KvrecallClient) -> None:
    session = client.create_session(budget=64, seed=1).id
    page = watched(served.session(session))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    asked: list[str] = []
    other = page.context.new_page()
    other.on("request", lambda request: asked.append(request.url))
    other.goto(served.session(session))
    expect(other.get_by_text("live", exact=True)).to_be_visible()
    client.turn(session, "Hello.", max_tokens=2)
    for tab in (page, other):
        expect(tab.locator(".figures div", has_text="Turns").locator("dd").first).to_have_text("1")
    assert not [url for url in asked if url.endswith("/stream")]
    page.close()  # the other one takes over
    client.turn(session, "Hello.", max_tokens=2)
    expect(other.locator(".figures div", has_text="Turns").locator("dd").first).to_have_text("2")
    assert [url for url in asked if url.endswith("/stream")]
