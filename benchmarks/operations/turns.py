"""Time per output token of two pairs of gateway and worker, one traced and scraped, turn by turn."""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.operations.servers import collecting, copy_endless_model, scraping, served
from kvrecall.client import KvrecallClient, TextDelta, TurnCompleted
from kvrecall.reporting.results import Row, bootstrap, quality_row, speed_row

OBSERVED, PLAIN = "traced and scraped", "neither"
WARM_TURNS = 3
TURNS_OF_A_SESSION = 16


def measure_turns(turns: int, tokens: int, rng: random.Random) -> list[Row]:
    """Rows of both pairs, and of their difference."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        here = Path(folder)
        environment = {"KVRECALL_MODEL": str(copy_endless_model(here)), "OMP_NUM_THREADS": "1"}
        collector, received = stack.enter_context(collecting())
        traced = environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector}
        plain = stack.enter_context(served(here / "plain", environment))
        observed = stack.enter_context(served(here / "observed", traced))
        stack.enter_context(scraping(observed.metrics))
        urls = {OBSERVED: observed.gateway, PLAIN: plain.gateway}
        times = run_turns(urls, turns, tokens, rng)
    assert received, "no trace was exported: the pair was not observed"
    return build_rows(times, tokens)


def run_turns(
    urls: Mapping[str, str], turns: int, tokens: int, rng: random.Random
) -> dict[str, list[float]]:
    """Seconds per output token of each turn, by pair; the same turns in both, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(KvrecallClient(url, timeout_seconds=300))
            for name, url in urls.items()
        }
        sessions: dict[str, str] = {}
        for number in range(WARM_TURNS + turns):
            if number % TURNS_OF_A_SESSION == 0:
                sessions = {
                    name: client.create_session(budget=256, seed=number).id
                    for name, client in clients.items()
                }
            text = " ".join(rng.choices(("locker", "garage", "code", "Ada", "office"), k=40))
            for name in sorted(clients, reverse=bool(number % 2)):
                times[name].append(stream_turn(clients[name], sessions[name], text, tokens))
    return {name: seconds[WARM_TURNS:] for name, seconds in times.items()}


def stream_turn(client: KvrecallClient, session: str, text: str, tokens: int) -> float:
    """Seconds per output token of a streamed turn, after its first token."""
    arrivals: list[float] = []
    generated = 0
    message = {"role": "user", "content": text}
    for event in client.stream(session, [message], max_tokens=tokens):
        if isinstance(event, TextDelta):
            arrivals.append(time.perf_counter())
        if isinstance(event, TurnCompleted):
            generated = event.turn.usage.output_tokens
    assert generated > 1, "an answer has several tokens"
    return (arrivals[-1] - arrivals[0]) / (generated - 1)


def build_rows(times: Mapping[str, Sequence[float]], tokens: int) -> list[Row]:
    """Rows of both pairs; the observed one's with its ratio, and the mean of the paired shares."""
    pairs = list(zip(times[OBSERVED], times[PLAIN], strict=True))
    mean = sum(times[PLAIN]) / len(pairs)
    # Of differences, not of ratios: one disturbed turn of the other pair would be all of their mean.
    shares = [(observed - plain) / mean for observed, plain in pairs]
    ratio = round(median(observed / plain for observed, plain in pairs), 4)
    against = {OBSERVED: {"ratio_to": PLAIN, "ratio": ratio}, PLAIN: {}}
    rows = [
        speed_row(name, "time per output token", "seconds", each, tokens=tokens, **against[name])
        for name, each in times.items()
    ]
    estimate = bootstrap(shares)
    assert estimate is not None, "there are turns"
    rows.append(quality_row("share that the observed pair takes longer", estimate, tokens=tokens))
    return rows
