"""Episodes are built from all rows of a session, which stays as it was.

Other sessions go on meanwhile.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest
import torch

from kvrecall.domain.episodes import ActiveEpisode
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.episodes.build import run_build
from workers.episodes.rows import EpisodeRows
from workers.errors import BadEpisode, BadSettings
from workers.primitives.scoring import attention_scores, cosine_to_mean, row_ranks

BUDGET = 48
# Without pooling: neighbours would share scores, and a selection among equals is arbitrary.
PAPER = '{"rank": "attention", "whole_tokens": false, "topic": 0, "pool": 1}'
SPEC: dict[str, Any] = {
    "method": "epicache",
    "method_settings": PAPER,
    "budget": BUDGET,
    "layer_budgets": "uniform",
}


@pytest.fixture
def talked(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> Callable[..., tuple[Any, list[int]]]:
    """talked(family, tokens, **spec).

    A worker with session "s" with many words, and the token ids of its rows.
    """

    def make(
        family: str = "llama", count: int = 250, slots: int = 2, **spec: Any
    ) -> tuple[Any, list[int]]:
        worker = make_worker(family, block_tokens=64, prompt_tokens=64, recent=8, slots=slots)
        worker.open(**SPEC | spec)
        said = [
            worker.turn("s", words(count // 2, seed=seed), generate=False).token_ids
            for seed in range(2)
        ]
        rows = worker.engine.session("s").length
        return worker, [token for turn in said for token in turn][:rows]

    return make


def plan(
    prompt: Sequence[int], name: str = "e", segments: Sequence[tuple[int, int, float]] = ()
) -> pb.EpisodePlan:
    """A plan; segments as (start, stop, similarity)."""
    spans = [pb.Span(start=start, stop=stop, similarity=near) for start, stop, near in segments]
    return pb.EpisodePlan(id=name, patched_prompt=prompt, segments=spans)


def held(episode: pb.Episode) -> list[list[list[int]]]:
    """An episode's positions, per layer and head."""
    layers = EpisodeRows.from_bytes(episode.rows).positions
    return [[[p for p in head if p != EMPTY] for head in layer.tolist()] for layer in layers]


def drive(
    worker: Any, *plans: pb.EpisodePlan, token_ids: Sequence[int] = ()
) -> tuple[list[pb.Episode], int]:
    """Drive a build without a scheduler: its episodes, and the number of its yields."""
    request = pb.BuildEpisodesRequest(session="s", epoch=1, plans=plans, token_ids=token_ids)
    resident = worker.engine.swap_in(worker.engine.session("s"))
    steps = run_build(worker.engine, resident, request)
    paused = 0
    while True:
        try:
            waiting = next(steps)
        except StopIteration as finished:
            return list(finished.value.episodes), paused
        if waiting is not None:
            assert isinstance(waiting, Future)
            waiting.result(60)
        paused += 1


# One pass


@pytest.mark.parametrize("length", [12, 150])
def test_an_episode_is_the_methods_selection_by_attention_over_all_rows(
    length: int, talked: Callable[..., Any]
) -> None:
    """A prompt longer than a piece is observed in several."""
    worker, said = talked()
    engine = worker.engine
    session = worker.engine.session("s")
    prompt = said[20 : 20 + length]
    (episode,) = worker.build("s", plan(prompt))
    instruction = engine.tokenizer.encode(session.config.method.observation.prompt)
    room = engine.settings.prompt_tokens - len(instruction)
    seen = [
        engine.observe(engine.resident("s"), [*instruction, *prompt[at : at + room]])
        for at in range(0, length, room)
    ]
    rows = engine.store.gather("s", torch.arange(session.length))
    positions = torch.arange(session.length, dtype=torch.int32).expand(2, -1)
    for layer, kept in enumerate(held(episode)):
        of_pieces = [
            attention_scores(s.queries[layer], rows[layer, 0], positions, s.positions) for s in seen
        ]
        scores = torch.stack(of_pieces).amax(0)
        scores[:, :4] = torch.inf
        best = scores.flatten().topk(2 * BUDGET).indices.tolist()
        assert sum(map(len, kept)) == 2 * BUDGET
        assert {(head, p) for head, row in enumerate(kept) for p in row} == {
            divmod(i, session.length) for i in best
        }
    assert (episode.length, list(episode.patched_prompt)) == (session.length, prompt)


def test_plans_built_together_equal_each_built_alone(talked: Callable[..., Any]) -> None:
    worker, said = talked()
    plans = [plan(said[start : start + 30], f"e{start}") for start in (10, 80, 150, 220)]
    together = worker.build("s", *plans)
    assert [episode.id for episode in together] == [each.id for each in plans]
    for each, episode in zip(plans, together, strict=True):
        (alone,) = worker.build("s", each)
        assert held(alone) == held(episode)
    assert len({str(held(episode)) for episode in together}) == 4


def test_a_layers_rows_follow_the_layer_budgets(talked: Callable[..., Any]) -> None:
    worker, said = talked("qwen2", layer_budgets="pyramid")
    expected = worker.engine.session("s").config.layer_rows
    assert len(set(expected)) > 1
    (episode,) = worker.build("s", plan(said[:20]))
    assert [sum(map(len, layer)) for layer in held(episode)] == [2 * rows for rows in expected]


def test_an_episode_keeps_whole_tokens_of_its_own_segments_first(
    talked: Callable[..., Any],
) -> None:
    worker, said = talked(method_settings='{"topic": 2}')
    near = [(0, 30, 0.0), (30, 40, 1.0), (40, 100, 0.5), (100, 120, 1.0), (120, len(said), 0.0)]
    (episode,) = worker.build("s", plan(said[:20], segments=near))
    kept = held(episode)
    assert all(head == kept[0][0] for layer in kept for head in layer), (
        "the same tokens in every layer and head"
    )
    assert {*range(4), *range(30, 40), *range(100, 120)} <= set(kept[0][0])
    assert len(kept[0][0]) == BUDGET
    assert set(kept[0][0]) - {*range(4), *range(30, 40), *range(100, 120)} <= set(range(40, 100))


def test_among_equally_near_tokens_those_with_keys_unlike_the_others_stay(
    talked: Callable[..., Any],
) -> None:
    worker, said = talked(count=280, method_settings="{}")  # without two sums that are nearly equal
    (episode,) = worker.build("s", plan(said[:20], segments=[(0, len(said), 1.0)]))
    rows = worker.engine.store.gather("s", torch.arange(len(said)))
    positions = torch.arange(len(said), dtype=torch.int32).expand(2, -1)
    kept = torch.arange(len(said))
    while (
        len(kept) > BUDGET
    ):  # a fifth leaves at a time: what stays is compared with what is still there
        shown = positions[:, : len(kept)]
        ranks = torch.stack(
            [row_ranks(-cosine_to_mean(layer[0][:, kept], shown), shown) for layer in rows]
        )
        order = (
            ranks.mean((0, 1))
            .masked_fill(kept < 4, torch.inf)
            .sort(descending=True, stable=True)
            .indices
        )
        shortlist = 4 * BUDGET if len(kept) == len(said) else max(BUDGET, int(len(kept) * 0.8))
        kept = kept[order[:shortlist]].sort().values
    best = kept
    assert held(episode)[0][0] == sorted(best.tolist())


def test_a_session_within_its_budget_is_one_episode_whole(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    worker.open(**SPEC | {"budget": 400})
    said = worker.turn("s", words(60), generate=False).token_ids
    (episode,) = worker.build("s", plan(said[:5]))
    rows = worker.engine.session("s").length
    assert held(episode) == [[list(range(rows))] * 2] * 2


# What a build leaves


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("repaired", [False, True])
def test_a_build_leaves_the_session_unchanged(
    anew: bool, repaired: bool, talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, said = talked(slots=1, budget=BUDGET + 8, repair_rows=8)
    if repaired:
        worker.repair("s", text=words(6, seed=8))
    session = worker.engine.session("s")
    before = worker.engine.snapshot(session)
    stored = worker.engine.store.sessions()
    worker.build("s", plan(said[:100]), plan(said[100:110], "f"), token_ids=said if anew else ())
    assert worker.engine.snapshot(session) == before
    assert worker.engine.store.sessions() == stored
    assert worker.engine.store.length("s") == len(said)
    worker.check()


@pytest.mark.parametrize("anew", [False, True])
def test_a_turn_after_a_build_generates_the_same_as_without(
    anew: bool,
    talked: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[..., list[int]],
) -> None:
    (worker, said), (other, _) = talked(), talked()
    worker.build("s", plan(said[:100]), token_ids=said if anew else ())
    asked = words(10, seed=4)
    assert answer(worker.turn("s", asked)) == answer(other.turn("s", asked))


@pytest.mark.parametrize("anew", [False, True])
def test_a_build_yields_between_its_steps(anew: bool, talked: Callable[..., Any]) -> None:
    worker, said = talked()
    plans = [plan(said[:20], name) for name in "ab"]
    _, paused = drive(worker, *plans, token_ids=said if anew else ())
    blocks = -(-len(said) // 64)
    assert paused >= (2 * blocks if anew else 2 + 2)


@pytest.mark.parametrize("anew", [False, True])
def test_other_sessions_decode_while_episodes_are_built(
    anew: bool, talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, said = talked()
    worker.open("other")
    plans = [plan(said[:20], str(index)) for index in range(6)]
    request = pb.BuildEpisodesRequest(
        session="s", epoch=1, plans=plans, token_ids=said if anew else ()
    )
    builds: list[Future[pb.BuildEpisodesResult]] = []
    meanwhile: list[bool] = []

    def say(event: pb.TurnEvent) -> None:
        """On the scheduler's thread.

        The first token starts the build, the others see whether it goes on.
        """
        if builds:
            meanwhile.append(not builds[0].done())
        else:
            builds.append(worker.scheduler.build_episodes(request))

    worker.submit("other", words(5), emit=say).result(600)
    assert len(builds[0].result(600).episodes) == 6
    assert sum(meanwhile) >= 10
    worker.check()


@pytest.mark.parametrize("anew", [False, True])
def test_a_cancelled_build_leaves_the_session_open_and_no_slot_taken(
    anew: bool, talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, said = talked(count=500)
    session = worker.engine.session("s")
    before = worker.engine.snapshot(session)
    plans = [plan(said[:60], str(index)) for index in range(4)]
    steps = run_build(
        worker.engine,
        worker.engine.resident("s"),
        pb.BuildEpisodesRequest(session="s", plans=plans, token_ids=said if anew else ()),
    )
    for _ in range(5):
        if (waiting := next(steps)) is not None:
            assert isinstance(waiting, Future)
            waiting.result(60)
    steps.close()
    assert worker.engine.snapshot(session) == before
    assert worker.engine.cache.free_slots() == (2 if anew else 1)
    worker.turn("s", words(5), max_tokens=2)
    worker.check()


def test_a_cancelled_build_may_be_followed_by_a_turn(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Whenever it is cancelled, in its last step too, the session stays open."""
    worker, said = talked()
    for _ in range(20):
        request = pb.BuildEpisodesRequest(session="s", epoch=1, plans=[plan(said[:20])])
        worker.scheduler.build_episodes(request).cancel()
    assert worker.turn("s", words(5), max_tokens=2).output_tokens == 2
    worker.check()


@pytest.mark.parametrize("anew", [False, True])
def test_another_tenants_question_is_answered_while_episodes_are_built(
    anew: bool, talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    """A build gives up its slot, or, if it holds a scratch session's, the turn beside it does."""
    worker, said = talked(tenant="flood")
    worker.open("other", tenant="flood")
    worker.open("question", tenant="late")
    plans = [plan(said[:20], str(index)) for index in range(9)]
    request = pb.BuildEpisodesRequest(
        session="s", epoch=1, plans=plans, token_ids=said if anew else ()
    )
    jobs: list[Future[Any]] = []
    ended: list[str] = []
    asked = Event()

    def say(event: pb.TurnEvent) -> None:
        """On the scheduler's thread: begin the build, then ask the question."""
        if not jobs:
            jobs.append(worker.scheduler.build_episodes(request))
            jobs[0].add_done_callback(lambda _: ended.append("build"))
        elif len(jobs) == 1 and worker.scheduler.count_jobs()["build", "running"]:
            if anew and worker.engine.sessions["s"].slot is not None:
                return  # it waits for writes, before its scratch session takes the slot
            jobs.append(worker.submit("question", words(5), max_tokens=2))
            jobs[1].add_done_callback(lambda _: ended.append("question"))
            asked.set()

    turn = worker.submit("other", words(5), max_tokens=200, emit=say)
    assert asked.wait(600)
    for job in (turn, *jobs):
        job.result(600)
    assert ended == ["question", "build"]
    worker.check()


def test_a_build_that_is_cancelled_while_it_is_preempted_leaves_no_rows_in_host_memory(
    talked: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    worker, said = talked()
    untouched, _ = talked()
    worker.open("question")
    session = worker.engine.session("s")
    request = pb.BuildEpisodesRequest(session="s", epoch=1, plans=[plan(said[:20])] * 9)
    worker.open("other")
    jobs: list[Future[Any]] = []
    preempted: list[bool] = []

    def say(event: pb.TurnEvent) -> None:
        """On the scheduler's thread: begin the build, then ask the question."""
        if not jobs:
            jobs.append(worker.scheduler.build_episodes(request))
        elif len(jobs) == 1 and worker.scheduler.count_jobs()["build", "running"]:
            jobs.append(worker.submit("question", words(5), max_tokens=9, emit=cancel))

    def cancel(event: pb.TurnEvent) -> None:
        preempted.append(session.preempted is not None)
        jobs[0].cancel()

    worker.submit("other", words(5), max_tokens=60, emit=say).result(600)
    jobs[1].result(600)
    assert preempted[0]
    assert not preempted[-1]
    assert answer(worker.turn("s", words(9))) == answer(untouched.turn("s", words(9)))
    worker.check()


# By prefill


def test_a_build_by_prefill_equals_the_active_rows_of_a_session_with_that_prompt(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, said = talked()
    (episode,) = worker.build("s", plan(said[30:50]), token_ids=said)
    episode_prompt = ActiveEpisode(patched_prompt=tuple(said[30:50]))
    session = worker.engine.session("s").create_scratch(episode_prompt)
    session.turn_start = len(said)
    resident = worker.engine.swap_in(session)
    for start in range(0, len(said), 64):
        worker.engine.forward([resident], torch.tensor([said[start : start + 64]]))
        worker.engine.evict(resident)
    for layer, kept in enumerate(held(episode)):
        _, _, positions = worker.engine.cache.get_rows(resident.slot, layer)
        assert kept == [[p for p in head if p != EMPTY] for head in positions.tolist()]
        assert sum(map(len, kept)) == 2 * BUDGET
    worker.engine.discard(session)


def test_episodes_by_prefill_differ_by_their_prompts_and_can_be_switched_to(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, said = talked()
    first, second = worker.build(
        "s", plan(said[:40], "a"), plan(said[150:190], "b"), token_ids=said
    )
    assert held(first) != held(second)
    moved = worker.turn("s", words(4), max_tokens=2, episode=first).switched
    assert moved.rows_moved + moved.rows_kept == 2 * 2 * BUDGET
    worker.check()


# Size, and what is refused


def test_index_lists_take_under_2_percent_of_the_bytes_of_copies(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("reference", block_tokens=128)
    worker.open(method="epicache", budget=128, layer_budgets="uniform")
    said = worker.turn("s", words(300), generate=False).token_ids
    said = said[: worker.memory().length]
    for anew in ((), said):
        (episode,) = worker.build("s", plan(said[:60]), token_ids=anew)
        shape = worker.engine.model.shape
        copies = EpisodeRows.from_bytes(episode.rows).row_count() * shape.row_bytes(
            worker.engine.model.dtype
        )
        assert copies == shape.n_layers * shape.n_kv_heads * 128 * 2 * shape.head_dim * 4
        assert len(episode.rows) < 0.02 * copies


def test_an_impossible_build_is_refused_and_changes_nothing(talked: Callable[..., Any]) -> None:
    worker, said = talked()
    before = worker.engine.snapshot(worker.engine.session("s"))
    for refused, why in (
        (plan([]), "no patched prompt"),
        (plan([5], segments=[(0, len(said) + 1, 1)]), "segments beyond"),
        (plan([5], segments=[(7, 3, 1)]), "segments beyond"),
    ):
        with pytest.raises(BadEpisode, match=why):
            worker.build("s", refused)
    with pytest.raises(BadEpisode, match="tokens are to be prefilled"):
        worker.build("s", plan([5]), token_ids=[*said, 5])
    assert worker.engine.snapshot(worker.engine.session("s")) == before
    worker.open("full")
    with pytest.raises(BadSettings, match="has no episodes"):
        worker.build("full", plan([5]))
