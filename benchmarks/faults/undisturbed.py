"""A service without faults: what the answers should be."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.faults.load.client import FaultClient
from benchmarks.faults.load.counters import Counters
from benchmarks.faults.load.scripts import Script
from benchmarks.faults.load.transcript import Transcript
from benchmarks.faults.rig.setups import Rig, embedded


@dataclass(frozen=True)
class Undisturbed:
    """Transcripts by script number, and the addresses of the service, which still runs."""

    transcripts: Mapping[int, Transcript]
    urls: Sequence[str]


@contextmanager
def undisturbed_service(folder: Path, rig: Rig, scripts: Sequence[Script]) -> Iterator[Undisturbed]:
    """Run a service without faults, and all scripts on it."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = embedded(folder, Rig(rig.model, rig.zygote))
    client = FaultClient(setup.urls, Counters(), Random(0), calm=True)
    try:
        setup.start()
        transcripts = {
            script.number: Transcript(script, f"calm-{script.number}") for script in scripts
        }
        for transcript in transcripts.values():
            client.run(transcript)
            client.delete_sessions(transcript)
        yield Undisturbed(transcripts, setup.urls)
    finally:
        client.close()
        setup.close()
