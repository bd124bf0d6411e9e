"""Every page with real sessions: what it shows is what the API says, live and by address."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Page, expect

from kvrecall.client import KvrecallClient, NotFound
from kvrecall.domain.phases import Phase
from tests.console.served import ON_CALL, SMALL_TALK, Console

Open = Callable[..., Page]
PAGES = ("", "sessions", "workers", "methods", "playground")
PHASES = [phase.replace("_", " ") for phase in Phase]
SESSION_PAGES = ("", "turns", "repairs", "episodes", "forks")


@contextmanager
def busy(url: str) -> Iterator[str]:
    """A session in which turns and repairs run meanwhile."""
    ended = threading.Event()
    with KvrecallClient(url) as client:
        session = client.create_session(
            budget=128, research={"method": "snapkv", "repair_rows": 32}, tools=[ON_CALL], seed=3
        ).id
        client.turn(session, SMALL_TALK * 5, generate=False)

        def work() -> None:
            while not ended.is_set():
                turn = client.turn(session, "Who is on call today, and what is their extension?")
                for call in turn.tool_calls:
                    client.event(session, "tool_call.started", call.id)
                    client.event(
                        session, "tool_call.completed", call.id, result='{"person": "Ada"}'
                    )
                if turn.tool_calls:
                    client.turn(session, [], max_tokens=8, stop=["<tool_call>"])

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield session
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("path", [*PAGES, *(f"sessions/SESSION/{name}" for name in SESSION_PAGES)])
def test_a_page_stands_while_turns_and_repairs_run(
    served: Console, watched: Open, path: str
) -> None:
    with busy(served.url) as session:
        page = watched(served.page(path.replace("SESSION", session).rstrip("/")))
        expect(page.locator("h1")).to_have_count(1)
        if "SESSION" in path:
            turns = page.locator(".figures div", has_text="Turns").locator("dd").first
            before = int(turns.inner_text())
            expect(turns).not_to_have_text(str(before))  # counts without being loaded anew
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_text("Loading…")).to_have_count(0)


def test_the_overview_counts_turns_and_names_what_is_wrong(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.page())
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    totals = served.get("/v1/overview")["totals"]
    assert totals["repairs"] > 0
    expect(page.get_by_role("region", name="Anything wrong")).to_contain_text(
        "✓" if totals["failed_turns"] + totals["not_durable_turns"] == 0 else "turn"
    )
    expect(page.locator(".uplot")).to_have_count(2)
    expect(page.locator("dd", has_text="reference")).to_be_visible()


def test_the_overview_says_what_layers_keep_and_the_bytes(served: Console, watched: Open) -> None:
    """Of the served model, whose layers are alike, and of one with windows and states."""
    page = watched(served.page())
    model = served.get("/v1/worker")
    (kind,) = model["layer_kinds"]
    figures = page.locator(".figures").first
    expect(figures).to_contain_text(f"{model['layers']} layers, {model['kv_heads']} KV heads")
    stored = figures.locator("div", has_text="Stored").locator("dd")
    expect(stored).to_have_text(f"{kind['token_bytes'] / 1024:.2f} KiB a token")
    state = {"name": "recurrent state", "layers": 3, "token_bytes": 0, "state_bytes": 3 << 20}
    window = {"name": "window of 48 tokens", "layers": 2, "token_bytes": 1 << 14, "state_bytes": 0}
    model["layer_kinds"] = [{**kind, "token_bytes": 1 << 13}, window, state]
    page.route("**/v1/worker", lambda route: route.fulfill(json=model))
    page.reload()
    expect(figures).to_contain_text("2 × window of 48 tokens, 3 × recurrent state")
    expect(stored).to_have_text("24.0 KiB a token, and 3.00 MiB a state")


def test_sessions_are_filtered_by_address_and_change_live(
    served: Console, watched: Open, client: KvrecallClient, talk: str
) -> None:
    page = watched(served.page("sessions", q="talk"))
    table = page.get_by_role("table")
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table.get_by_role("link", name=talk)).to_be_visible()
    page.get_by_label("Text in id or metadata").fill("made while it is open")
    expect(page.get_by_text("No session matches these filters.")).to_be_visible()
    expect(page).to_have_url(re.compile(re.escape("q=made+while+it+is+open")))
    made = client.create_session(metadata={"note": "made while it is open"}).id
    expect(table.get_by_role("link", name=made)).to_be_visible()
    row = table.locator("tbody tr")
    expect(row).to_contain_text("idle")
    client.turn(made, "Hello.", max_tokens=4)
    expect(row.locator("td").nth(6)).to_have_text("1")
    client.delete_session(made)
    expect(page.get_by_text("No session matches these filters.")).to_be_visible()


def test_the_log_has_all_messages_and_links_to_their_tokens(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.session(talk, "turns"))
    turns = served.get(f"/v1/sessions/{talk}/turns")["turns"]
    expect(page.get_by_role("article")).to_have_count(len(turns))
    last = page.get_by_role("article", name=f"Turn {turns[-1]['turn']}", exact=True)
    expect(last).to_contain_text(turns[-1]["answer"]["content"])
    expect(last).to_contain_text("tool on_call")
    last.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Memory of {talk}")
    span = f"start={turns[-1]['start']}&stop={turns[-1]['stop']}"
    expect(page).to_have_url(re.compile(re.escape(span)))


def test_a_turn_names_the_request_that_ran_it(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session().id
    names = {"x-request-id": "r-17", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    names["user-agent"] = "agent/7 (a test)"
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    httpx.post(
        f"{served.url}/v1/sessions/{session}/turns", json=body, headers=names, timeout=60
    ).raise_for_status()
    page = watched(served.session(session, "turns"))
    origin = f"request r-17 · trace {'ab' * 16} · through REST API · client agent/7"
    expect(page.get_by_role("article")).to_contain_text(origin)


def test_a_session_is_titled_by_its_name_and_its_id_is_beside_it(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session(metadata={"name": "Ann's research", "team": "red"}).id
    page = watched(served.session(session, "turns"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Turns of Ann's research")
    expect(page).to_have_title("Turns of Ann's research · kvrecall")
    expect(page.locator(".page-head")).to_contain_text(session)
    expect(page.locator(".figures")).to_contain_text("name: Ann's research, team: red")
    page.get_by_role("link", name="Forks").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Forks of Ann's research")


def test_the_memory_after_an_earlier_turn_is_a_forks(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session().id
    for number in range(3):
        client.turn(session, f"This is turn {number}.", generate=False)
    page = watched(served.session(session, "turns"))
    last = page.get_by_role("article", name="Turn 3", exact=True)
    expect(last.get_by_role("link", name="Memory after it")).to_be_visible()
    page.get_by_role("article", name="Turn 1", exact=True).get_by_role("button").click()
    expect(page.get_by_role("heading", level=1)).not_to_contain_text(session)
    expect(page.get_by_role("region", name="Memory map").first).to_be_visible()
    fork = page.get_by_role("heading", level=1).inner_text().removeprefix("Memory of ")
    found = served.get(f"/v1/sessions/{fork}")
    assert found["forked_from"] == {"session": session, "turn": 1}
    assert found["turns"] == 1


def test_a_sessions_log_is_downloaded_whole(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session().id
    for number in range(3):
        client.turn(session, f"This is turn {number}.", generate=False)
    page = watched(served.session(session))
    with page.expect_download() as begun:
        page.get_by_role("button", name="Download the log").click()
    saved = begun.value
    assert saved.suggested_filename == f"{session}.json"
    log = json.loads(saved.path().read_text("utf-8"))
    assert log["session"]["id"] == session
    assert log["turns"] == served.get(f"/v1/sessions/{session}/turns")["turns"]


def test_a_session_is_deleted_once_that_was_confirmed(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session().id
    page = watched(served.session(session))
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep it").click()
    assert client.get_session(session).id == session
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sessions")
    with pytest.raises(NotFound):
        client.get_session(session)


def test_repairs_have_a_lane_with_their_call_and_link_to_what_they_brought_back(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.session(talk, "repairs"))
    repairs = served.get(f"/v1/sessions/{talk}/repairs", limit=32)["repairs"]
    lane = page.locator("figure.lane")
    expect(lane).to_have_count(2)  # of the question, before it was answered, and of the pause
    expect(lane.locator("rect.call")).to_have_count(1)
    expect(lane.locator("rect.repair")).to_have_count(len(repairs))
    rows = page.get_by_role("region", name="The last repairs, newest first").locator("tbody tr")
    expect(rows).to_have_count(len(repairs))
    for row, repair in zip(rows.all(), repairs, strict=True):
        expect(row).to_contain_text(repair["trigger"].replace("_", " "))
        cells = row.locator("td").all_inner_texts()
        assert str(repair["promoted"]) in cells
    passage = next(each["passages"][0] for each in repairs if each["passages"])
    page.get_by_role("link", name=re.compile(f"tokens {passage['start']}–")).first.click()
    expect(page.get_by_role("complementary", name="Why")).to_contain_text(
        f"Token {passage['start']}"
    )


def test_episodes_show_their_sizes_and_the_turns_that_went_there(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    session = client.create_session(
        research={"method": "epicache", "repair_rows": 0}, budget=128, seed=2
    ).id
    client.turn(session, SMALL_TALK * 12, generate=False)
    page = watched(served.session(session, "episodes"))
    table = page.get_by_role("region", name="Episodes, the largest first")
    expect(table).to_be_visible()  # they are built while the session is idle
    episodes = served.get(f"/v1/sessions/{session}/episodes")["episodes"]
    expect(table.locator("tbody tr")).to_have_count(len(episodes))
    client.turn(session, "What about the match?", max_tokens=4)
    turns = page.get_by_role("region", name="The last turns and their episodes")
    expect(turns.locator("tbody tr")).to_have_count(1)


def test_a_fork_is_made_and_shown_in_the_family(
    served: Console, watched: Open, client: KvrecallClient
) -> None:
    parent = client.create_session(budget=128, seed=2).id
    client.turn(parent, SMALL_TALK * 3, generate=False)
    page = watched(served.session(parent, "forks"))
    page.get_by_role("button", name="Fork").click()
    expect(page.get_by_role("heading", level=1)).not_to_contain_text(parent)
    child = page.url.rsplit("/", 1)[1]
    page.get_by_role("link", name="Forks").click()
    tree = page.locator(".family")
    expect(tree.get_by_role("link", name=parent)).to_be_visible()
    expect(tree.locator("ul .self")).to_contain_text(child)
    expect(tree.locator("ul .self")).to_contain_text("tokens shared with it")


def test_workers_show_their_slots_tiers_and_sessions(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.page("workers"))
    worker = served.get("/v1/workers")["workers"][0]
    section = page.get_by_role("region", name=f"Worker {worker['name']}", exact=True)
    expect(section).to_contain_text(f"of {worker['slots']}")
    for tier in worker["stats"]["tiers"]:
        expect(section.get_by_role("rowheader", name=tier["name"], exact=True)).to_be_visible()
    expect(section.get_by_role("link", name=talk)).to_be_visible()
    expect(section.get_by_role("button", name=re.compile("Move"))).to_have_count(0)  # to whom?


def test_methods_have_the_settings_of_their_schemas(served: Console, watched: Open) -> None:
    page = watched(served.page("methods"))
    methods = served.get("/v1/methods")
    for method in [methods["repair"], *methods["methods"]]:
        section = page.get_by_role("region", name=method["name"], exact=True)
        expect(section.locator("p").first).to_have_text(method["summary"])
        for setting in method["settings_schema"].get("properties", {}):
            expect(section.get_by_role("rowheader", name=setting, exact=True)).to_be_visible()


def test_an_unknown_address_and_an_unknown_session_are_told_apart(
    served: Console, watched: Open
) -> None:
    page = watched(served.page("nothing/here"))
    expect(page.get_by_role("heading", level=1)).to_have_text("No such page")
    page = watched(served.session("s_none"))
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("unknown_session")
    expect(problem.locator("code").last).to_have_text(re.compile(r"^[0-9a-f]{16}$"))  # request id


def test_a_session_of_another_page_is_the_same_page_by_back_and_forth(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.page("sessions"))
    page.get_by_role("link", name=talk).click()
    page.get_by_role("link", name="Repairs", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Repairs of {talk}")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Memory of {talk}")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sessions")
    page.go_forward()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Memory of {talk}")


def test_a_service_without_a_worker_is_no_green_tick(served: Console, watched: Open) -> None:
    page = watched(served.page("methods"))
    page.route("**/v1/workers", lambda route: route.fulfill(json={"workers": []}))
    page.goto(served.page())
    wrong = page.get_by_role("region", name="Anything wrong")
    expect(wrong).to_contain_text("No worker answers.")
    expect(wrong).not_to_contain_text("✓")


def test_workers_that_are_not_known_are_no_green_tick(served: Console, watched: Open) -> None:
    page = watched(served.page("methods"))
    page.route("**/v1/workers", lambda route: route.fulfill(status=503, json={"title": "down"}))
    totals = served.get("/v1/overview")["totals"]
    page.goto(served.page())
    wrong = page.get_by_role("region", name="Anything wrong")
    expect(wrong).to_contain_text("turn" if totals["failed_turns"] else "not known")
    expect(wrong).not_to_contain_text("✓")


def test_sessions_that_could_not_be_created_are_wrong(served: Console, watched: Open) -> None:
    page = watched(served.page("methods"))
    overview = served.get("/v1/overview")
    overview["totals"]["failed_creations"] = 3
    page.route("**/v1/overview", lambda route: route.fulfill(json=overview))
    page.goto(served.page())
    expect(page.get_by_role("region", name="Anything wrong")).to_contain_text(
        "3 sessions could not be created."
    )


@pytest.mark.parametrize("path", ["", "sessions", "workers", "sessions/SESSION/turns"])
def test_a_lost_connection_is_shown_with_the_time_of_what_is_seen(
    new_console: Callable[..., Console], watched: Open, path: str
) -> None:
    console = new_console()
    with KvrecallClient(console.url) as client:
        session = client.create_session(budget=64, research={"repair_rows": 0}).id
    page = watched(console.page(path.replace("SESSION", session)))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.get_by_text("Loading…")).to_have_count(0)  # the stream may be the first to come
    console.kill()
    lost = page.get_by_text("connection lost; shown is the state of")
    expect(lost).to_have_text(re.compile(r"state of \d\d:\d\d:\d\d$"))
    console.process.start()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    console.kill()


def test_phases_have_colours_by_name_in_the_order_of_time(
    served: Console, watched: Open, talk: str
) -> None:
    page = watched(served.session(talk, "turns"))
    expect(page.get_by_role("article").first).to_be_visible()
    found: dict[str, set[str]] = {}
    for legend in page.locator("ul.legend").all():
        names = []
        for item in legend.locator("li").all():
            name = re.sub(r" [\d.]+ m?s( after [\d.]+ m?s)?$", "", item.inner_text().strip())
            style = item.locator(".swatch").get_attribute("style") or ""
            found.setdefault(name, set()).add(style)
            names.append(name)
        assert names == sorted(names, key=PHASES.index)
    assert {"prefill", "decode"} <= found.keys()
    assert all(len(styles) == 1 for styles in found.values())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_phase_of_a_turn_is_shown_with_its_beginning_and_a_colour_of_its_own(
    served: Console, watched: Open, talk: str, theme: str
) -> None:
    page = watched(served.page("methods"), color_scheme=theme)
    log = served.get(f"/v1/sessions/{talk}/turns", limit=1)
    shuffled = sorted(Phase)
    log["turns"][0] |= {
        "seconds": dict.fromkeys(shuffled, 0.25),
        "phase_starts": {phase: 2.0 * place for place, phase in enumerate(Phase)},
    }
    page.route("**/turns?*", lambda route: route.fulfill(json=log))
    page.goto(served.session(talk, "turns"))
    listed = page.get_by_role("article").locator(".legend li")
    starts = ["", *(f" after {2 * place:.2f} s" for place in range(1, 5))]
    expect(listed).to_have_count(len(PHASES))
    shown = listed.all_inner_texts()
    assert [text.partition(" 250 ms")[0] for text in shown] == PHASES
    assert [text.partition(" 250 ms")[2] for text in shown][:5] == starts
    background = "elements => elements.map(each => getComputedStyle(each).backgroundColor)"
    colors = page.locator(".legend .swatch").evaluate_all(background)
    assert len(set(colors)) == len(PHASES)
    assert page.locator(".bar > span").evaluate_all(background) == colors
