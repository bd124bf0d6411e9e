"""Sessions that go on behind the model's window: as the definition says, and the same after any interruption."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from tests.workers.conftest import WAIT, answer_of
from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.family import Family, words
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.positions.oracle import Oracle
from tests.workers.tasks.turn_log import logged, rebuild
from workers.engine.settings import WorkerSettings
from workers.errors import RowsMissing, TurnTooLong
from workers.model.loader import adopt
from workers.model.tokenizer import load_tokenizer
from workers.native.attention import NativeAttention

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 192
"""Three chunks of a page."""
LIMITS: dict[str, Any] = {"block_tokens": 32, "recent": 8, "max_budget": 1024, "window": WINDOW}
ACTIVE: dict[str, Any] = {"method": "icecache", "budget": 1024}
"""All rows stay active."""
ALL: dict[str, Any] = {
    "method": "icecache",
    "budget": 1000,
    "layer_budgets": "pyramid",
    "method_settings": '{"share": 0.9}',
}
"""100 rows are active, and all others retrieved."""
FEW: dict[str, Any] = {
    "method": "icecache",
    "budget": 64,
    "repair_rows": 8,
    "method_settings": '{"share": 0.4}',
}
FAMILIES = {
    "llama": DENSE["llama"],
    "rotated in part, neighbours": DENSE["glm"],
    "layers without positions": DENSE["smollm3"],
    "windows, bases by layer": WINDOWED["gemma3_text"],
    "recurrent": RECURRENT["qwen3_next"],
}


@pytest.fixture(params=["torch", "native"])
def backend(
    request: pytest.FixtureRequest, native: NativeAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What computes the steps of every worker of a test."""
    opened = {"torch": None, "native": native}[request.param]
    monkeypatch.setattr(NativeAttention, "open", lambda _rotations, _group: opened)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[[Architecture], Family]]:
    """family(architecture): a model with a window of 192 tokens in a worker."""
    made: list[Family] = []
    settings = WorkerSettings(slots=2, max_budget=1024, block_tokens=32, recent=8)

    def make(architecture: Architecture) -> Family:
        tokenizer = load_tokenizer(MODEL_PATH, (1,))
        built = Family(architecture, tokenizer, tmp_path, settings, window=WINDOW)
        made.append(built)
        return built

    yield make
    for each in made:
        each.close()


def check_turns(worker: Any, oracle: Oracle, turns: int, tokens: int = 10) -> pb.TurnDone:
    """Check that every token of a session's answers is the best one by the definition."""
    said: list[int] = []
    for seed in range(turns):
        done: pb.TurnDone = worker.turn("s", words(40, seed), max_tokens=tokens)
        before = [*said, *done.token_ids[: done.prompt_tokens]]
        answer = answer_of(done)
        assert oracle.say([*before, *answer[:-1]], len(answer)) == answer, f"turn {seed}"
        said += done.token_ids
    assert done.state.length > 3 * WINDOW
    return done


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("spec", [ACTIVE, ALL], ids=["active", "retrieved"])
def test_answers_behind_the_window_are_those_of_the_definition(
    kind: str, spec: dict[str, Any], family: Callable[[Architecture], Family]
) -> None:
    """With all rows active, and with most of them retrieved."""
    served = family(FAMILIES[kind])
    worker = served.worker
    chunks = worker.engine.long_sessions.chunks
    assert chunks is not None
    oracle = Oracle(copy.deepcopy(served.plain), worker.engine.model.rotations, chunks)
    worker.open("s", **spec)
    done = check_turns(worker, oracle, 9)
    assert (spec is ALL) == bool(done.retrieval.rows)
    worker.check()


@pytest.mark.usefixtures("backend")
def test_steps_that_retrieve_all_rows_answer_as_with_all_rows_active(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("active", **ACTIVE)
    worker.open("s", **ALL)
    for seed in range(9):
        expected = worker.turn("active", words(40, seed), max_tokens=8)
        assert worker.turn("s", words(40, seed), max_tokens=8).token_ids == expected.token_ids
    assert expected.state.length > 3 * WINDOW


def talk(worker: Any, name: str, seeds: Sequence[int], **options: Any) -> list[pb.TurnDone]:
    return [worker.turn(name, words(40, seed), max_tokens=8, **options) for seed in seeds]


def answers(turns: Sequence[pb.TurnDone]) -> list[list[int]]:
    return [list(done.token_ids) for done in turns]


@pytest.mark.usefixtures("backend")
def test_up_to_the_window_nothing_changes(make_worker: Callable[..., Any]) -> None:
    """Tokens and rows, to the last bit, of a session that ends just at the window's end."""
    long = make_worker(**LIMITS | {"window": 2048})
    short = make_worker(**LIMITS | {"window": 448})
    found = []
    for worker in (long, short):
        worker.open("s", **FEW)
        found.append(talk(worker, "s", range(4)))
    assert answers(found[0]) == answers(found[1])
    length = found[0][-1].state.length
    assert 384 <= length <= 448
    rows = [each.engine.store.gather("s", torch.arange(length)) for each in (long, short)]
    assert torch.equal(*rows)


@pytest.mark.usefixtures("backend")
def test_a_restarted_worker_goes_on_with_the_same_tokens(make_worker: Callable[..., Any]) -> None:
    """After each turn, so that chunks begin before, within and after it."""
    whole = make_worker(**LIMITS)
    whole.open("s", **FEW)
    expected = answers(talk(whole, "s", range(10)))
    state, found = pb.SessionState(), []
    for seed in range(10):
        worker = make_worker(directory="kept", **LIMITS)
        worker.open("s", state=state, **FEW)
        (done,) = talk(worker, "s", [seed])
        state = done.state
        found.append(list(done.token_ids))
        worker.close()
    assert found == expected
    assert state.length > 3 * WINDOW


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("page", [0, 2, 5, 8])
def test_lost_pages_are_computed_again_with_the_same_bits(
    page: int, make_worker: Callable[..., Any], lose_page: Callable[..., None]
) -> None:
    """Of the window, of the chunks behind it, and of those that the answer's chunk is far from."""
    worker = make_worker(**LIMITS)
    for name in ("s", "twin"):
        worker.open(name, **FEW)
    turns = talk(worker, "s", range(9))
    talk(worker, "twin", range(9))
    length = turns[-1].state.length
    before = worker.engine.store.gather("s", torch.arange(length))
    lose_page(worker.engine.store, "s", page)
    for session in worker.engine.sessions.values():
        worker.engine.drop_host_copy(session)
    with pytest.raises(RowsMissing):
        worker.turn("s", "and then", max_tokens=6)
    log = [logged(done, words(40, seed)) for seed, done in enumerate(turns)]
    assert rebuild(worker, turns[-1].state, log, epoch=2, **FEW).pages == 1
    assert torch.equal(worker.engine.store.gather("s", torch.arange(length)), before)
    worker.open("s", epoch=2, state=turns[-1].state, **FEW)
    ours = worker.turn("s", "and then", epoch=2, max_tokens=6)
    assert ours.token_ids == worker.turn("twin", "and then", max_tokens=6).token_ids
    worker.check()


@pytest.mark.usefixtures("backend")
def test_a_fork_behind_the_window_goes_on_as_its_parent(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **FEW)
    state = talk(worker, "s", range(8))[-1].state
    worker.open("child", state=state, **FEW)
    assert answers(talk(worker, "child", [20, 21])) == answers(talk(worker, "s", [20, 21]))


@pytest.mark.usefixtures("backend")
def test_a_batch_of_sessions_in_several_chunks_decodes_as_each_alone(
    make_worker: Callable[..., Any],
) -> None:
    """Within the window, behind it, with and without retrieval."""
    turns = {"a": 1, "b": 6, "c": 9}
    specs = {"a": FEW, "b": FEW, "c": ACTIVE}
    found = []
    for slots in (1, 3):
        worker = make_worker(slots=slots, **LIMITS)
        for name, count in turns.items():
            worker.open(name, **specs[name])
            talk(worker, name, range(count))
        running = [worker.submit(name, "and then", max_tokens=30) for name in turns]
        found.append([list(each.result(WAIT).token_ids) for each in running])
    assert found[0] == found[1]
    assert (2, 1) in worker.engine.passes, "those behind the window are a batch of their own"


def test_a_repair_behind_the_window_brings_back_what_its_signal_names(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **FEW)
    talk(worker, "s", range(9))
    report = worker.repair("s", messages=[{"role": "user", "content": words(40, 2)}]).report
    assert report.candidates > 3 * WINDOW
    assert len(report.promoted) > 0
    assert talk(worker, "s", [10])[0].output_tokens == 8
    worker.check()


def test_a_session_ends_where_the_operator_says(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(max_session_tokens=450, **LIMITS)
    worker.open("s", **FEW)
    talk(worker, "s", range(4))
    with pytest.raises(TurnTooLong, match="max_session_tokens of this worker is 450"):
        worker.turn("s", words(100))
    assert worker.turn("s", words(10)).memory.length <= 450


@pytest.mark.parametrize("spec", [{"budget": 1024}, {"method": "snapkv", "budget": 64}])
def test_a_session_without_recall_ends_with_the_window_and_is_told_how_to_go_on(
    spec: dict[str, Any], make_worker: Callable[..., Any]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **spec)
    with pytest.raises(TurnTooLong, match=r"ends at 192.*one with recall goes on behind it"):
        talk(worker, "s", range(4))


def test_a_model_whose_rotations_depend_on_the_length_ends_with_its_window_by_name(
    family: Callable[[Architecture], Family],
) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    llama = DENSE["llama"]
    served = family(replace(llama, settings={**llama.settings, "rope_parameters": parameters}))
    served.worker.open("s", **FEW)
    assert served.worker.engine.long_sessions.most_tokens == WINDOW
    with pytest.raises(TurnTooLong, match="llama has dynamic rotary scaling, whose frequencies"):
        talk(served.worker, "s", range(4))


def test_a_model_that_does_more_to_rotated_keys_ends_with_its_window() -> None:
    """Hunyuan weighs a key's numbers behind the rotation."""
    plain = Family(DENSE["hunyuan_v1_dense"], load_tokenizer(MODEL_PATH, (1,)), Path()).plain
    model = adopt(plain)
    assert not model.rotations
    assert model.unrotated == "does not rotate the keys of layer 0 by their positions"
