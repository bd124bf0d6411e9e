"""fsck, doctor, export and import over the folders of a worker of two ranks."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.page_ids import make_random_id
from kvrecall_server.app.rank_storage import Rank, list_ranks
from kvstore.format.page import HEADER_BYTES, seal
from kvstore.fsck import check_directory
from kvstore.tiers.nvme.tier import NvmeTier
from reference import MODEL_PATH
from tests.kvrecall_server.admin.conftest import _settings

Command = Callable[..., Any]
PAIR = ("--tensor-parallel", 2)


@dataclass(frozen=True)
class Stopped:
    """A data directory of a stopped worker of two ranks, and its session."""

    data: Path
    session: str

    def pages_of(self, rank: int) -> Path:
        """The folder of a rank's pages."""
        return Rank(rank, 2).find_folder(self.data) / "pages"


@pytest.fixture(scope="module")
def stopped_once(serve: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """The directory that every test gets a copy of."""
    data = tmp_path_factory.mktemp("stopped") / "data"
    return Stopped(data, serve(data))


@pytest.fixture
def stopped(stopped_once: Stopped, tmp_path: Path) -> Stopped:
    shutil.copytree(stopped_once.data, tmp_path / "data")
    return Stopped(tmp_path / "data", stopped_once.session)


def test_fsck_finds_what_one_rank_has_lost_and_a_turn_computes_it_again(
    command: Command, stopped: Stopped, answer: Any, reply: Any
) -> None:
    clean = command("fsck", "--data", stopped.data)
    assert clean.exit_code == 0, clean.output
    assert all(f"nvme of rank {rank}: " in clean.output for rank in range(2))
    expected = reply(stopped.data, stopped.session)
    segment = min(stopped.pages_of(1).glob("segment-*"))
    content = bytearray(segment.read_bytes())
    content[HEADER_BYTES + 3] ^= 1
    segment.write_bytes(content)
    found = command("fsck", "--data", stopped.data, *PAIR)
    assert found.exit_code == 1
    assert f"session {stopped.session}, rank 1" in found.output
    assert f"session {stopped.session}, rank 0" not in found.output
    assert "unreadable" in found.output
    assert answer(stopped.data, stopped.session) == expected
    again = command("fsck", "--data", stopped.data, *PAIR)
    assert again.exit_code == 0, again.output


def test_a_page_that_one_rank_alone_has_is_reported_and_deleted(
    command: Command, stopped: Stopped
) -> None:
    new = make_random_id()
    with closing(NvmeTier(stopped.pages_of(1))) as tier:
        header = next(tier.stored())
        (blob,) = tier.get([header.id])
        assert blob is not None
        tier.put([(new, seal(replace(header, id=new), bytes(blob)[HEADER_BYTES:]))])
        tier.flush()
    found = command("fsck", "--data", stopped.data)
    assert found.exit_code == 0, found.output
    assert "tiers, rank 1" in found.output
    assert "1 page of no session" in found.output
    repaired = command("fsck", "--data", stopped.data, "--repair")
    assert "--repair, rank 1" in repaired.output
    assert check_directory(stopped.pages_of(1)).pages.keys() == (
        check_directory(stopped.pages_of(0)).pages.keys()
    )


def test_rows_of_another_number_of_ranks_are_named_with_the_way_to_have_their_space_back(
    command: Command, stopped: Stopped
) -> None:
    for rank in list_ranks(3):
        shutil.copytree(stopped.pages_of(0), rank.find_folder(stopped.data) / "pages")
    unclear = command("fsck", "--data", stopped.data)
    assert unclear.exit_code == 2
    assert "workers of 2 and of 3 ranks" in unclear.output
    found = command("fsck", "--data", stopped.data, *PAIR)
    assert found.exit_code == 0, found.output
    assert "of a worker of 3 ranks" in found.output
    assert "Delete rank-*-of-3" in found.output
    checks = _diagnose(command, stopped.data, *PAIR)
    assert checks["rows of other ranks"]["result"] == "note"
    assert "Delete rank-*-of-3" in checks["rows of other ranks"]["advice"]
    for folder in stopped.data.glob("rank-*-of-3"):
        shutil.rmtree(folder)
    assert "rows of other ranks" not in _diagnose(command, stopped.data, *PAIR)
    alone = _diagnose(command, stopped.data)
    assert "rows of other ranks" not in alone, "nobody has said that another worker runs here"


def test_doctor_says_which_heads_do_not_divide_and_that_a_rank_s_rows_are_in_use(
    command: Command, stopped: Stopped
) -> None:
    checks = _diagnose(command, stopped.data, *PAIR)
    assert checks["ranks"]["result"] == "ok"
    odd = _diagnose(command, stopped.data, "--tensor-parallel", 7)
    assert odd["ranks"]["result"] == "wrong"
    with closing(NvmeTier(stopped.pages_of(1))):
        busy = _diagnose(command, stopped.data, *PAIR)
    assert "in use" in busy["data directory"]["advice"]


def _diagnose(command: Command, data: Path, *options: object) -> dict[str, Any]:
    """The checks of doctor, by their names."""
    found = command("doctor", "--json", "--data", data, "--model", MODEL_PATH, *options)
    return {check["name"]: check for check in json.loads(found.stdout)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_session_goes_on_elsewhere_by_replay(
    command: Command, stopped: Stopped, tmp_path: Path, answer: Any, reply: Any, ranks: int
) -> None:
    file, there = tmp_path / "s.kvs", tmp_path / "there"
    exported = command("export", stopped.session, file, "--data", stopped.data)
    assert exported.exit_code == 0, exported.output
    assert "no rows" in exported.output
    imported = command("import", file, "--data", there, "--tensor-parallel", ranks)
    assert imported.exit_code == 0, imported.output
    expected = reply(stopped.data, stopped.session)
    assert answer(there, stopped.session, ranks) == expected


def test_a_session_of_one_process_goes_on_in_two_ranks(
    command: Command, serve_one: Any, tmp_path: Path, answer: Any
) -> None:
    data, file, there = tmp_path / "data", tmp_path / "s.kvs", tmp_path / "there"
    session = serve_one(data)
    assert command("export", session, file, "--data", data).exit_code == 0
    imported = command("import", file, "--data", there, *PAIR)
    assert imported.exit_code == 0, imported.output
    assert "computed again" in imported.output
    assert answer(there, session) == answer(data, session, 1)


def test_settings_of_a_rank_are_its_part(tmp_path: Path) -> None:
    store = {"nvme_bytes": 1001, "redis_bytes": 2000, "redis_url": "redis://there"}
    whole = _settings(tmp_path, store=store)
    assert Rank().settings_of(whole) == whole
    part = Rank(1, 2, 2).settings_of(whole)
    assert part.data == tmp_path / "rank-1-of-2"
    assert (part.store.nvme_bytes, part.store.redis_bytes) == (500, 1000)
    assert part.store.redis_namespace == "kvrecall-rank-1-of-2"


def test_a_rank_alone_on_its_machine_has_its_disk_for_itself(tmp_path: Path) -> None:
    store = {"nvme_bytes": 1001, "redis_bytes": 2000, "redis_url": "redis://there"}
    part = Rank(1, 2, 1).settings_of(_settings(tmp_path, store=store))
    assert (part.store.nvme_bytes, part.store.redis_bytes) == (1001, 1000)
