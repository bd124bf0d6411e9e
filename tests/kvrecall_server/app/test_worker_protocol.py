"""A worker does as its protocol says, inside the process and over the network alike."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.local.worker import LocalWorkerClient
from kvrecall_server.app.wiring import build_worker_service
from reference import MODEL_PATH
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.pool import WorkerPool
from services.cluster.settings import WireSettings
from services.cluster.worker_client import Worker
from tests.services.cluster.cluster import WAY, Known
from workers.engine.session_state import STATE_VERSION
from workers.engine.settings import WorkerSettings
from workers.rpc.server import WorkerServer
from workers.rpc.service import WorkerService
from workers.rpc.settings import ServerSettings

SPOKEN = pb.Message(role="user", content="Where does she live?")
# Its signal has a token that no model has: the pass over it raises.
UNREPAIRABLE = pb.RepairRequest(session="s", epoch=1, trigger="tool_call", token_ids=[10**6])
# Its state has positions, and no marks of promotions beside them.
UNREADABLE = pb.MapRowsRequest(
    state=pb.SessionState(
        length=5,
        selection=save({"positions.0": torch.zeros(1)}),
        state_version=STATE_VERSION,
    ),
    stop=5,
    columns=1,
)

WorkerAt = Callable[..., AbstractAsyncContextManager[Worker]]


@asynccontextmanager
async def inside(data: Path, **settings: Any) -> AsyncIterator[Worker]:
    """A worker in this process, closed at the end."""
    worker = LocalWorkerClient(calls_at(data, **settings))
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def over_grpc(data: Path, **settings: Any) -> AsyncIterator[Worker]:
    """A worker behind a server and a connection of this machine."""
    calls = calls_at(data, **settings)
    server = WorkerServer(ServerSettings(listen="127.0.0.1:0"))
    await server.start(calls)
    worker = GrpcWorkerClient(WireSettings(worker=server.address))
    try:
        yield worker
    finally:
        await worker.close()
        await server.stop()
        await calls.close()


def calls_at(data: Path, **settings: Any) -> WorkerService:
    """The calls of the packaged model."""
    return build_worker_service(
        MODEL_PATH, data, WorkerSettings(max_budget=256, **settings), ram_bytes=1 << 24
    )


@pytest.fixture(params=[inside, over_grpc])
def worker_at(request: pytest.FixtureRequest) -> WorkerAt:
    """Both ways to a worker."""
    way: WorkerAt = request.param
    return way


async def talked(worker: Worker, **spec: Any) -> list[int]:
    """Open a session "s" and append a long message; returns the token ids of its rows."""
    defaults: dict[str, Any] = {"method": "epicache", "budget": 64, "layer_budgets": "uniform"}
    spec = defaults | spec
    await worker.open(pb.OpenRequest(spec=pb.SessionSpec(session="s", epoch=1, **spec)))
    said = [pb.Message(role="user", content="My sister lives in Lisbon and paints boats. " * 20)]
    events = [
        event async for event in worker.turn(pb.TurnRequest(session="s", epoch=1, messages=said))
    ]
    done = events[-1].done
    return list(done.token_ids[: done.state.length])


async def test_the_worker_describes_its_repair_settings(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        described = await worker.describe()
        for each in (described.repair, described.prefill, described.retrieve):
            assert each.name
            assert json.loads(each.settings_schema)["properties"]


async def test_tokens_become_the_text_of_their_turn(worker_at: WorkerAt, tmp_path: Path) -> None:
    async with worker_at(tmp_path) as worker:
        ids = await talked(worker, method="snapkv")
        chunks = [pb.TokenChunk(ids=part) for part in (ids, ids[:5], [])]
        whole, start, nothing = (await worker.detokenize(pb.DetokenizeRequest(chunks=chunks))).texts
        assert "My sister lives in Lisbon and paints boats." in whole
        assert whole.startswith(start)
        assert (bool(start), nothing) == (True, "")


async def test_rows_of_a_committed_state_are_mapped_by_a_worker_that_has_no_session(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path / "one") as worker:
        await worker.open(
            pb.OpenRequest(spec=pb.SessionSpec(session="s", epoch=1, method="snapkv", budget=64))
        )
        said = [pb.Message(role="user", content="My sister paints boats. " * 30)]
        request = pb.TurnRequest(session="s", epoch=1, messages=said)
        *_, last = [event async for event in worker.turn(request)]
        memory = await worker.memory("s")
    state = last.done.state
    async with worker_at(tmp_path / "two") as other:
        info = await other.describe()
        mapped = await other.map_rows(
            pb.MapRowsRequest(state=state, stop=state.length, columns=7, tokens=True)
        )
        assert [len(layer.active) for layer in mapped.layers] == [7] * info.layers
        active = sum(mark > 0 for mark in mapped.rows)
        assert len(mapped.rows) == state.length * info.layers * info.kv_heads
        reported = info.kv_heads * sum(memory.active_rows)  # means over heads, rounded up
        assert 0 <= reported - active < info.kv_heads * info.layers
        with pytest.raises(WorkerRefused, match="no KV head 9"):
            await other.map_rows(pb.MapRowsRequest(state=state, stop=5, columns=1, head=9))


async def test_a_prompt_has_as_many_tokens_as_are_computed_for_it(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    said = [
        pb.Message(role="system", content="You help."),
        pb.Message(role="user", content="My sister lives in Lisbon and paints boats."),
    ]
    async with worker_at(tmp_path) as worker:
        for number, tools in enumerate(([], ['{"type": "function", "function": {"name": "f"}}'])):
            spec = pb.SessionSpec(
                session=f"s{number}",
                epoch=1,
                method="snapkv",
                budget=64,
                layer_budgets="uniform",
                tools=tools,
            )
            await worker.open(pb.OpenRequest(spec=spec))
            turn = pb.TurnRequest(
                session=spec.session,
                epoch=1,
                messages=said,
                generate=True,
                sampling=pb.Sampling(max_tokens=1),
            )
            *_, last = [event async for event in worker.turn(turn)]
            counted = await worker.tokenize(pb.TokenizeRequest(messages=said, tools=tools))
            assert len(counted.ids) == last.done.prompt_tokens


async def test_a_repair_that_stops_early_reports_its_progress(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        await worker.stop_early(pb.StopEarlyRequest(session="unknown"))
        await talked(worker, method="snapkv", repair_rows=8)
        request = pb.RepairRequest(session="s", epoch=1, trigger="tool_call", text="boats")
        repairing = asyncio.create_task(worker.repair(request))
        await asyncio.sleep(0)
        await worker.stop_early(pb.StopEarlyRequest(session="s"))
        stopped = (await repairing).report
        whole = (await worker.repair(request)).report
        assert stopped.candidates == whole.candidates > 0
        assert (
            stopped.scored_rows < stopped.candidates
            if stopped.truncated
            else len(stopped.promoted) == 8
        )
        assert (whole.truncated, len(whole.promoted)) == (False, 8)


async def test_texts_become_unit_vectors(worker_at: WorkerAt, tmp_path: Path) -> None:
    async with worker_at(tmp_path) as worker:
        found = await worker.embed(["a cat", "a kitten", "tax law"])
        vectors = np.frombuffer(found.vectors, dtype="<f4").reshape(-1, found.dimensions)
        assert vectors.shape == (3, 384)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        none = await worker.embed([])
        assert (none.dimensions, none.vectors) == (384, b"")


async def test_an_encoder_that_cannot_be_loaded_is_a_refusal(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path, embedder=str(tmp_path / "nothing")) as worker:
        with pytest.raises(WorkerRefused) as refused:
            await worker.embed(["a cat"])
        assert refused.value.code == "embedder_refused"


async def test_episodes_are_built_and_a_turn_switches_to_one(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        said = await talked(worker)
        plans = [
            pb.EpisodePlan(id="a", patched_prompt=said[:30]),
            pb.EpisodePlan(id="b", patched_prompt=said[-30:]),
        ]
        built = await worker.build_episodes(
            pb.BuildEpisodesRequest(session="s", epoch=1, plans=plans)
        )
        assert [episode.id for episode in built.episodes] == ["a", "b"]
        assert built.scored_rows == len(said)
        assert built.seconds > 0
        request = pb.TurnRequest(session="s", epoch=1, messages=[SPOKEN], episode=built.episodes[1])
        events = [event async for event in worker.turn(request)]
        assert events[-1].done.switched.episode == events[-1].done.state.episode == "b"
        (stats,) = (await worker.stats()).values()
        assert stats.slots_in_use == 1


async def test_a_refusal_has_its_code(worker_at: WorkerAt, tmp_path: Path) -> None:
    async with worker_at(tmp_path) as worker:
        said = await talked(worker)
        cases = [
            (
                "bad_episode",
                pb.BuildEpisodesRequest(session="s", epoch=1, plans=[pb.EpisodePlan(id="a")]),
            ),
            ("session_not_open", pb.BuildEpisodesRequest(session="unknown", epoch=1)),
            ("stale_epoch", pb.BuildEpisodesRequest(session="s", epoch=9)),
        ]
        for code, request in cases:
            with pytest.raises(WorkerRefused) as refused:
                await worker.build_episodes(request)
            assert refused.value.code == code
        broken = pb.Episode(id="a", rows=b"nothing", length=len(said))
        turn = worker.turn(pb.TurnRequest(session="s", epoch=1, messages=[SPOKEN], episode=broken))
        with pytest.raises(WorkerRefused) as refused:
            await anext(turn)
        assert refused.value.code == "bad_episode"


async def test_a_job_that_raises_is_refused_and_the_worker_goes_on(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    """A token that the model has not, a state that lacks a part."""
    async with worker_at(tmp_path) as worker:
        await talked(worker, method="snapkv", repair_rows=8)
        raising = [
            (worker.repair(UNREPAIRABLE), "IndexError"),
            (worker.map_rows(UNREADABLE), "IndexError"),
        ]
        for call, kind in raising:
            with pytest.raises(WorkerRefused, match=rf"did not expect \({kind}\)") as refused:
                await call
            assert refused.value.code == "worker_error"
        await worker.delete(pb.DeleteRequest(session="s"))
        assert await talked(worker, method="snapkv")


async def test_a_worker_with_a_job_that_raises_keeps_its_sessions(tmp_path: Path) -> None:
    """Beside another worker: that one is not tried, and no session moves."""
    known = Known()
    async with AsyncExitStack() as stack:
        for name in "ab":
            worker = await stack.enter_async_context(over_grpc(tmp_path / name))
            (record,) = await worker.workers()
            known.add(name, record.address, model=record.model, fingerprint=record.fingerprint)
        pool = await WorkerPool.start(known, WAY)
        stack.push_async_callback(pool.close)
        assert pool.choose_worker("s", "a") == "a"
        await talked(pool, method="snapkv", repair_rows=8)
        with pytest.raises(WorkerRefused):
            await pool.repair(UNREPAIRABLE)
        with pytest.raises(WorkerRefused):
            await pool.map_rows(UNREADABLE)
        assert [pool.choose_worker(f"other {name}", name) for name in "ab"] == ["a", "b"]


async def test_cancelling_a_build_leaves_the_session_to_its_next_turn(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        said = await talked(worker)
        plans = [pb.EpisodePlan(id=str(index), patched_prompt=said[:100]) for index in range(40)]
        build = asyncio.create_task(
            worker.build_episodes(
                pb.BuildEpisodesRequest(session="s", epoch=1, plans=plans, token_ids=said)
            )
        )
        await asyncio.sleep(0)  # the call is made
        await worker.memory("s")  # and the scheduler has it
        build.cancel()
        with pytest.raises(asyncio.CancelledError):
            await build
        events = [
            event
            async for event in worker.turn(pb.TurnRequest(session="s", epoch=1, messages=[SPOKEN]))
        ]
        state = events[-1].done.state
        assert state.length + len(state.pending) > len(said)


async def test_closing_a_turn_early_cancels_it_and_an_open_rolls_it_back(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        said = await talked(worker, method="snapkv")
        speaking = pb.TurnRequest(session="s", epoch=1, messages=[SPOKEN], generate=True)
        speaking.sampling.max_tokens = 3000
        async with aclosing(worker.turn(speaking)) as events:
            assert (await anext(events)).HasField("planned")
            assert (await anext(events)).token.ids
        # A session's turns follow each other: this one begins when that one has ended, and finds
        # what it left.
        with pytest.raises(WorkerRefused, match="in the middle of a turn") as refused:
            await anext(worker.turn(speaking))
        assert refused.value.code == "session_not_open"
        await worker.delete(pb.DeleteRequest(session="s"))
        assert await talked(worker, method="snapkv") == said
        assert (await worker.memory("s")).length == len(said)
        listed = [part.page_ids async for part in worker.list_pages("", pb.ListPagesRequest())]
        pages = pb.DeletePagesRequest(page_ids=b"".join(listed))
        await worker.delete_pages(pages)  # the cancelled turn's
        assert (await worker.delete_pages(pages)).deleted == 0, "the session has the others"
        assert (await worker.memory("s")).length == len(said)
        await worker.delete(pb.DeleteRequest(session="s"))
        assert (await worker.delete_pages(pages)).deleted > 0
        (stats,) = (await worker.stats()).values()
        assert sum(tier.bytes for tier in stats.tiers.values()) == 0


async def test_a_single_worker_is_chosen_for_every_session(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path, slots=3) as worker:
        await talked(worker)
        (record,) = await worker.workers()
        assert (record.slots, record.free_slots, record.sessions, record.draining) == (
            3,
            2,
            1,
            False,
        )
        assert worker.choose_worker("s", "") == worker.choose_worker("s", "another") == record.name
        assert list(await worker.stats()) == [record.name]
        with pytest.raises(WorkerLost):
            worker.choose_worker("s", "", [record.name])


async def test_a_released_session_continues_when_it_is_opened_again(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        said = await talked(worker, method="snapkv")
        await worker.release(pb.ReleaseRequest(session="s", epoch=0))
        assert (await worker.memory("s")).length == len(said)  # it was opened here later
        await worker.release(pb.ReleaseRequest(session="s", epoch=2))
        with pytest.raises(WorkerRefused) as refused:
            await worker.memory("s")
        assert refused.value.code == "session_not_open"


async def test_after_closing_every_call_is_lost_or_refused(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with worker_at(tmp_path) as worker:
        pass
    with pytest.raises((WorkerLost, WorkerRefused)):
        await worker.embed(["a cat"])
    with pytest.raises((WorkerLost, WorkerRefused)):
        await worker.build_episodes(pb.BuildEpisodesRequest(session="s", epoch=1))
