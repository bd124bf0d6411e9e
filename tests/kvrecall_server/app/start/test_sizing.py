"""What `kvrecall size` adds up is what a worker allocates and a store holds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.sizing import (
    Deployment,
    Load,
    Need,
    add_up,
    count_states,
    get_ram_setting,
    get_stored_bytes,
    list_needs,
)
from kvstore.format.codec import Codec
from kvstore.format.page import HEADER_BYTES
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from reference import MODEL_PATH
from tests.kvstore.page_ids import make_ids
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.recurrent import RECURRENT
from workers.engine.settings import WorkerSettings
from workers.engine.snapshots import choose_dropped
from workers.model.loader import load_model
from workers.model.sizes import ModelSizes, measure_sizes, read_sizes

SETTINGS = WorkerSettings(slots=3, max_budget=512)
LOAD = Load(sessions=10, tokens=1000, shared=0)
FILES = Deployment(SETTINGS, {"files": Codec.RAW})
STORED = "stored rows of a session"


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return read_sizes(MODEL_PATH)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_session_takes_the_bytes_of_its_pages_in_the_files(
    sizes: ModelSizes, tmp_path: Path, codec: Codec
) -> None:
    layout, tokens = sizes.layout, 200
    store = RowStore(
        layout, [RamTier(1 << 26), NvmeTier(tmp_path / "pages")], codecs=[Codec.RAW, codec]
    )
    ids = make_ids(range(tokens // layout.page_tokens))
    store.append("a", torch.randn(layout.rows_shape(tokens)).to(layout.dtype), ids)
    assert store.flush("a")
    assert store.usage()["nvme"] == get_stored_bytes(layout, tokens, codec)
    store.close()


def test_slots_take_what_a_worker_allocates_for_them(sizes: ModelSizes) -> None:
    model = load_model(MODEL_PATH, device="cpu", dtype=sizes.dtype)
    caches = model.create_caches(SETTINGS.slots, SETTINGS.slot_rows, SETTINGS.longest_pass)
    needs = {need.what: need for need in list_needs(sizes, LOAD, FILES)}
    allocated = sum(
        tensor.nbytes for memory in caches.active.pool.memories for tensor in memory.tensors()
    )
    assert needs["active rows of a slot"].total_bytes == allocated
    assert needs["weights"].total_bytes == sizes.weight_bytes


def test_shared_tokens_are_stored_once(sizes: ModelSizes) -> None:
    def get_stored(load: Load) -> int:
        needs = {need.what: need for need in list_needs(sizes, load, FILES)}
        return needs[STORED].total_bytes

    apart, together = get_stored(LOAD), get_stored(replace(LOAD, shared=640))
    assert apart == 10 * get_stored_bytes(sizes.layout, LOAD.tokens, Codec.RAW)
    shared = get_stored_bytes(sizes.layout, 640, Codec.RAW)
    assert together == apart - 9 * shared


def test_the_ram_setting_has_room_for_the_rows_of_all_slots(sizes: ModelSizes) -> None:
    needs = {need.what: need for need in list_needs(sizes, LOAD, FILES)}
    held = needs["rows of a session in a slot"].total_bytes
    ram = get_ram_setting(sizes, LOAD, FILES)
    assert RamTier(ram).reservable_bytes >= held > RamTier(ram - 8).reservable_bytes


def test_no_session_keeps_more_states_than_are_counted() -> None:
    hybrid = measure_sizes(build(RECURRENT["qwen3_next"]).config, torch.float32)
    page_tokens = hybrid.layout.page_tokens
    interval = -(-hybrid.state_bytes // hybrid.layout.token_bytes)
    kept: list[int] = []
    for length in range(page_tokens, 20 * max(interval, page_tokens), page_tokens):
        kept.append(length)  # a turn ends at each page
        for index in choose_dropped(kept, interval):
            del kept[index]
        assert len(kept) <= count_states(hybrid, length) <= len(kept) + 2
    (states,) = [
        need
        for need in list_needs(hybrid, LOAD, FILES)
        if need.what == "stored states of a session"
    ]
    assert states.each_bytes >= count_states(hybrid, LOAD.tokens) * hybrid.state_bytes


def test_ranks_together_take_what_one_process_takes_but_for_what_each_has_whole(
    sizes: ModelSizes,
) -> None:
    half = read_sizes(MODEL_PATH, ranks=2)
    whole = {need.what: need for need in list_needs(sizes, LOAD, FILES)}
    parts = {need.what: need for need in list_needs(half, LOAD, replace(FILES, ranks=2))}
    assert parts.keys() == whole.keys()
    slot = "active rows of a slot"
    assert parts[slot] == replace(whole[slot], where=parts[slot].where)
    weights = parts["weights"]
    assert (weights.count, weights.total_bytes) == (2, 2 * half.weight_bytes)
    assert whole["weights"].total_bytes < weights.total_bytes < 1.1 * whole["weights"].total_bytes
    pages = LOAD.tokens // sizes.layout.page_tokens
    assert parts[STORED].each_bytes - whole[STORED].each_bytes == pages * HEADER_BYTES
    catalog = "catalog of a session"
    assert parts[catalog] == whole[catalog]
    ram = get_ram_setting(half, LOAD, replace(FILES, ranks=2))
    assert ram >= get_ram_setting(sizes, LOAD, FILES)


@pytest.mark.parametrize(
    ("store", "places"),
    [
        ({}, {"files of the workers": Codec.RAW}),
        (
            {"redis_url": "redis://r:6379", "redis_codec": "int8"},
            {"files of the workers": Codec.RAW, "Redis": Codec.INT8},
        ),
        (
            {"cold_url": "s3://b/f", "nvme_codec": "int8"},
            {"files of the workers": Codec.INT8, "bucket, of sessions that sleep": Codec.INT8},
        ),
    ],
)
def test_rows_are_counted_in_every_place_that_the_settings_name(
    sizes: ModelSizes, store: dict[str, str], places: dict[str, Codec]
) -> None:
    deployment = Deployment.of(Settings.model_validate({"store": store}))
    assert deployment.places == places
    found = [need for need in list_needs(sizes, LOAD, deployment) if need.what == STORED]
    assert {need.where: need.each_bytes for need in found} == {
        place: get_stored_bytes(sizes.layout, LOAD.tokens, codec) for place, codec in places.items()
    }


def test_a_catalog_in_redis_is_counted_there(sizes: ModelSizes) -> None:
    def get_catalog(url: str | None) -> Need:
        deployment = Deployment.of(Settings.model_validate({"catalog_url": url}))
        return list(list_needs(sizes, LOAD, deployment))[-1]

    assert get_catalog(None).where == "file of the gateway"
    assert get_catalog("redis://r:6379").where == "Redis of the catalog"


@pytest.mark.parametrize(
    ("at_once", "ranks", "workers"), [(1, 1, 1), (3, 1, 1), (4, 1, 2), (7, 2, 3)]
)
def test_workers_are_as_many_as_have_slots_for_the_sessions_at_once(
    at_once: int, ranks: int, workers: int
) -> None:
    part = read_sizes(MODEL_PATH, ranks=ranks)
    found = add_up(part, replace(LOAD, at_once=at_once), replace(FILES, ranks=ranks))
    assert (found.at_once, found.workers) == (at_once, workers)
    weights, rows = found.needs[:2]
    assert found.device_bytes == (weights.total_bytes + rows.total_bytes) // ranks
