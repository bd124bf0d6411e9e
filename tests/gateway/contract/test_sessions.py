"""Sessions through either API: create, list, fork, delete, and writes that are repeated."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.contract.clients import Client, Refused
from tests.gateway.contract.conftest import Both

Json = dict[str, Any]
USER = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"b": {}, "a": {"minimum": 1}}},
    },
}
RESEARCH: Json = {
    "repair_rows": 10,
    "method": "snapkv",
    "method_settings": {"window": 8, "pooling": "mean"},
    "layer_budgets": "pyramid",
    "repair_on": ["last_output", "turn"],
    "repair_settings": {"select": "spread", "contrast": 1.0, "swap": True},
    "repair_seconds": 0.5,
    "reselect": {"every": 8},
    "prefill": {"attend": "active", "sparse": "auto", "alpha": 0.98},
    "retrieve": {"share": 0.25, "choice": "best", "index": "tree"},
}
FULL: Json = {
    "budget": 100,
    "research": RESEARCH,
    "expires_after_seconds": 3600.0,
    "seed": 7,
    "tools": [TOOL],
    "metadata": {"user": "ann", "empty": ""},
    "chat_template_kwargs": {"enable_thinking": False, "of": {"years": [2026, 0.5]}},
    "model": "scripted",
}


async def test_a_session_is_created_shown_listed_and_deleted(client: Client) -> None:
    view = await client.create(FULL)
    research = {name: view["research"][name] for name in RESEARCH}
    assert {name: view[name] for name in FULL} | {"research": research} == FULL
    assert view["recall"]
    assert (view["state"], view["turns"], view["length"]) == ("idle", 0, 0)
    assert await client.get(view["id"]) == view
    assert (await client.page())["sessions"] == [view]
    await client.delete(view["id"])
    for gone in (client.get(view["id"]), client.delete(view["id"])):
        with pytest.raises(Refused) as refused:
            await gone
        assert refused.value.code == "unknown_session"


async def test_a_session_is_the_same_in_both_apis(both: Both) -> None:
    without = FULL | {"research": RESEARCH | {"episodes": None}}
    made = [await both.rest.create(FULL), await both.rpc.create(without)]
    made.append(
        await both.rpc.create({"research": {"method": "epicache", "episodes": {"count": "auto"}}})
    )
    for view in made:
        rest, rpc = await both.rest.get(view["id"]), await both.rpc.get(view["id"])
        shown = {name: value for name, value in rest.items() if value is not None}
        for name in ("created_at", "updated_at"):
            assert shown.pop(name).removesuffix("Z") == rpc.pop(name).removesuffix("+00:00")
        for view in (shown, rpc):
            research = view["research"].items()
            view["research"] = {name: value for name, value in research if value is not None}
        assert shown == {name: value for name, value in rpc.items() if value is not None}


async def test_tools_reach_the_model_in_the_order_of_their_members(
    both: Both, client: Client
) -> None:
    view = await client.create({"tools": [TOOL]})
    (tool,) = both.worker.specs[view["id"]].tools
    assert tool.index('"b"') < tool.index('"a"')
    assert '"minimum": 1}' in tool


async def test_arguments_of_the_template_reach_the_model_and_forks_keep_them(
    both: Both, client: Client
) -> None:
    given = {"chat_template_kwargs": {"year": 2026, "enable_thinking": False}}
    view = await client.create(given)
    await client.turn(view["id"], {"messages": USER})
    fork = await client.fork(view["id"])
    await client.turn(fork["id"], {"messages": USER})
    for each in (view, fork):
        assert each["chat_template_kwargs"] == given["chat_template_kwargs"]
        options = json.loads(both.worker.specs[each["id"]].options)
        assert options["template_arguments"] == '{"enable_thinking": false, "year": 2026}'
    assert (await client.create())["chat_template_kwargs"] == {}


async def test_omitted_settings_get_defaults(client: Client) -> None:
    view = await client.create()
    assert (view["recall"], view["budget"]) == (True, "auto")
    research = view["research"]
    assert (research["method"], research["repair_rows"]) == ("icecache", 0)
    assert research["repair_on"] == ["tool_call", "tool_delta", "tool_result"]
    assert [research.get(name) for name in ("reselect", "episodes")] == [None] * 2
    created = await client.create({"research": {"repair_on": []}})
    assert created["research"]["repair_on"] == []
    assert (await client.create({"budget": "auto"}))["budget"] == "auto"


async def test_recall_keeps_all_tokens_reachable_and_its_absence_is_the_full_cache(
    client: Client,
) -> None:
    made = [await client.create({"recall": recall}) for recall in (True, False)]
    assert [(each["recall"], each["research"]["method"]) for each in made] == [
        (True, "icecache"),
        (False, "full"),
    ]
    by_method = await client.create({"research": {"method": "snapkv"}})
    assert not by_method["recall"]
    by_setting = await client.create({"research": {"method": "snapkv", "retrieve": {"share": 0.5}}})
    assert by_setting["recall"]


@pytest.mark.parametrize(
    ("body", "episodes"),
    [
        ({}, None),
        ({"research": {"method": "epicache", "episodes": None}}, None),
        ({"research": {"method": "epicache"}}, {}),
        ({"research": {"method": "epicache", "episodes": {}}}, {}),
        (
            {
                "research": {
                    "method": "epicache",
                    "episodes": {"count": "auto", "build": "per_episode"},
                }
            },
            {"count": "auto", "build": "per_episode"},
        ),
        ({"research": {"method": "epicache", "episodes": {"count": 2}}}, {"count": 2}),
    ],
)
async def test_methods_with_episodes_enable_them_unless_disabled(
    client: Client, body: dict[str, Any], episodes: dict[str, Any] | None
) -> None:
    default = {"count": 4, "build": "one_pass"}
    view = await client.create(body)
    given = view["research"].get("episodes")
    assert given == (None if episodes is None else default | episodes)
    shown = await client.read(view["id"], "episodes")
    assert (shown.get("settings"), shown["episodes"]) == (given, [])


async def test_a_salt_is_kept_by_the_session_and_its_forks_and_shown_by_none(
    both: Both, client: Client
) -> None:
    view = await client.create({"cache_salt": "zebra"})
    await client.turn(view["id"], {"messages": USER})
    fork = await client.fork(view["id"])
    for shown in (view, fork, await client.get(fork["id"]), await client.page()):
        assert "zebra" not in str(shown)
        assert "salt" not in str(shown)
    for each in (view, fork):
        assert (await both.service.get(each["id"]))[0].settings.cache_salt == "zebra"
    plain = await client.create()
    assert (await both.service.get(plain["id"]))[0].settings.cache_salt == ""


@pytest.mark.parametrize("salt", ["", "s" * 257])
async def test_a_salt_has_1_to_256_characters(client: Client, salt: str) -> None:
    with pytest.raises(Refused) as refused:
        await client.create({"cache_salt": salt})
    assert (refused.value.code, refused.value.fields) == ("invalid_request", ["cache_salt"])
    await client.create({"cache_salt": "s" * 256})


async def test_pages_list_all_sessions(client: Client) -> None:
    made = [(await client.create())["id"] for _ in range(5)]
    page = await client.page(limit=2)
    seen = [session["id"] for session in page["sessions"]]
    while page["next_cursor"]:
        page = await client.page(limit=2, cursor=page["next_cursor"])
        seen += [session["id"] for session in page["sessions"]]
    assert seen == made[::-1]


async def test_a_fork_is_a_session_with_its_fork_point(client: Client) -> None:
    parent = (await client.create({"metadata": {"name": "first"}, "seed": 1}))["id"]
    for _ in range(2):
        await client.turn(parent, {"messages": USER})
    fork = await client.fork(parent, {"turn": 1, "metadata": {"name": "second"}})
    assert (fork["forked_from"], fork["turns"]) == ({"session": parent, "turn": 1}, 1)
    assert (fork["metadata"], fork["seed"], fork["length"]) == ({"name": "second"}, 1, 3)
    assert await client.get(fork["id"]) == fork
    assert (await client.fork(parent))["metadata"] == {"name": "first"}
    assert (await client.fork(parent, {"metadata": {}}))["metadata"] == {}
    assert (await client.turn(fork["id"], {"messages": USER}))["turn"] == 2


async def test_writes_with_a_key_happen_once(both: Both, client: Client) -> None:
    both.worker.script = ["one", "two"]
    session = (await client.create({"budget": 64}, key="k1"))["id"]
    assert (await client.create({"budget": 64}, key="k1"))["id"] == session
    turns = [await client.turn(session, {"messages": USER}, key="k1") for _ in range(2)]
    assert turns[0] == turns[1]
    forks = [await client.fork(session, key="k1") for _ in range(2)]
    assert forks[0]["id"] == forks[1]["id"]
    with pytest.raises(Refused) as refused:
        await client.turn(session, {"messages": USER, "generate": False}, key="k1")
    assert refused.value.code == "idempotency_conflict"
    assert (await client.get(session))["turns"] == 1
    for _ in range(2):
        await client.delete(session, key="k1")
    assert both.worker.script == ["two"]


async def test_creations_at_once_with_one_key_make_one_session(client: Client) -> None:
    made = await asyncio.gather(*[client.create(key="k1") for _ in range(4)])
    assert len({view["id"] for view in made}) == 1


async def test_a_session_moves_between_workers(both: Both, client: Client) -> None:
    both.worker.names = ["one", "two"]
    session = (await client.create())["id"]
    await client.turn(session, {"messages": USER})
    for body, worker in (({}, "two"), ({"worker": "one"}, "one")):
        assert (await client.move(session, body))["worker"] == worker
        assert (await client.get(session))["worker"] == worker


async def test_the_model_the_methods_and_the_workers_are_described(client: Client) -> None:
    model = await client.describe("worker")
    assert (model["model"], model["min_budget"], model["max_budget"]) == ("scripted", 16, 1024)
    assert model["template_variables"] == []
    methods = await client.describe("methods")
    assert [method["name"] for method in methods["methods"]] == [
        "icecache",
        "snapkv",
        "full",
        "epicache",
    ]
    assert methods["repair"]["summary"] == "bursts around anchors"
    assert methods["prefill"]["summary"] == "lines of blocks"
    assert methods["retrieve"]["summary"] == "rows of a step"
    load = {"slots": 4, "free_slots": 3, "queued": 0, "sessions": 1, "draining": False}
    (worker,) = (await client.describe("workers"))["workers"]
    stats = worker.pop("stats")
    assert worker == {"name": "one", "address": "one:1", **load}
    assert (stats["lost_pages"], stats["rebuilt_pages"], stats["prefilled_tokens"]) == (3, 2, 11)
    nvme, ram = stats["tiers"]
    assert (nvme["name"], nvme["refused_pages"], nvme["written_bytes"]) == ("nvme", 5, 512)
    assert (ram["name"], ram["bytes"], ram["limit_bytes"], ram["hits"]) == ("ram", 640, 1000, 3)
