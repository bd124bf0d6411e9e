"""Two gateways and two workers on one Redis: what one gateway does is seen in the other's console."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from playwright.sync_api import Page, expect

from kvrecall.client import KvrecallClient
from tests.console.served import SMALL_TALK
from tests.end_to_end.servers import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Cluster]:
    """Two gateways and two workers with the reference model."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    shared = {
        "KVRECALL_CATALOG_URL": redis_url,
        "KVRECALL_STORE__REDIS_URL": redis_url,
        "KVRECALL_STORE__REDIS_NAMESPACE": uuid4().hex,
    }
    cluster = Cluster(folder, shared)
    cluster.start(gateways=2)
    yield cluster
    cluster.kill()


def test_a_turn_through_one_gateway_is_seen_in_the_others_console(
    cluster: Cluster, watched: Callable[..., Page]
) -> None:
    one, two = (gateway.address for gateway in cluster.gateways)
    with KvrecallClient(one) as client:
        session = client.create_session(budget=64, seed=1).id
        page = watched(f"{two}/console/sessions/{session}")
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        turns = page.locator(".figures div", has_text="Turns").locator("dd").first
        expect(turns).to_have_text("0")
        client.turn(session, "Hello.", max_tokens=2)
        # Sooner than the page would ask by itself.
        expect(turns).to_have_text("1", timeout=20_000)


def test_a_session_is_moved_after_a_question(
    cluster: Cluster, watched: Callable[..., Page]
) -> None:
    with KvrecallClient(cluster.url) as client:
        session = client.create_session(budget=64, seed=1).id
        client.turn(session, SMALL_TALK, generate=False)
        left = client.get_session(session).worker
        page = watched(f"{cluster.url}/console/workers")
        section = page.get_by_role("region", name=f"Worker {left}", exact=True)
        section.get_by_role("button", name=f"Move {session}").click()
        dialog = page.get_by_role("dialog", name=f"Move {session}?")
        dialog.get_by_role("button", name="Keep it").click()
        expect(dialog).to_be_hidden()
        assert client.get_session(session).worker == left
        section.get_by_role("button", name=f"Move {session}").click()
        dialog.get_by_role("button", name="Move", exact=True).click()
        expect(section.get_by_role("link", name=session)).to_have_count(0)
        assert client.get_session(session).worker != left
