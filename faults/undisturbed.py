"""A service without faults: what the answers should be."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.load.client import FaultClient
from faults.load.counters import Counters
from faults.load.scripts import Script
from faults.load.talks import TENANT, Talk, TalkScript
from faults.load.transcript import Transcript
from faults.rig.setups import Rig, embedded


@dataclass(frozen=True)
class Undisturbed:
    """Transcripts and talks by script number, and the service's addresses, which still runs."""

    transcripts: Mapping[int, Transcript]
    talks: Mapping[int, Talk]
    urls: Sequence[str]


@contextmanager
def undisturbed_service(
    folder: Path, rig: Rig, scripts: Sequence[Script], talk_scripts: Sequence[TalkScript] = ()
) -> Iterator[Undisturbed]:
    """Run a service without faults, and all scripts and talks on it."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = embedded(folder, Rig(rig.model, rig.zygote))
    client = FaultClient(setup.urls, Counters(), Random(0), calm=True)
    talker = FaultClient(setup.urls, Counters(), Random(0), tenant=TENANT)
    try:
        setup.start()
        transcripts = {
            script.number: Transcript(script, f"calm-{script.number}") for script in scripts
        }
        for transcript in transcripts.values():
            client.run(transcript)
            client.delete_sessions(transcript)
        talks = {script.number: Talk(script, f"calm-{script.number}") for script in talk_scripts}
        for talk in talks.values():
            talk.run(talker, calm=True)
            talk.delete(talker)
        yield Undisturbed(transcripts, talks, setup.urls)
    finally:
        client.close()
        talker.close()
        setup.close()
