"""Sessions that slept through the faults are asked anew, so that their rows are really read."""

from collections.abc import Sequence
from dataclasses import asdict

from faults import findings as kinds
from faults.checks import answers
from faults.findings import Findings
from faults.load.client import FaultClient, NotServedError
from faults.load.contest import QUESTION, Contest, replay
from faults.load.scripts import Json
from faults.load.talks import Talk
from faults.load.transcript import Transcript
from faults.rig.setups import Setup
from kvrecall.client import KvrecallError


def ask_slept(
    setup: Setup,
    client: FaultClient,
    transcript: Transcript,
    calm: Transcript,
    findings: Findings,
) -> None:
    """Ask for the old answers, then new questions, and delete the sessions of a script."""
    slept = len(transcript.answers)
    try:
        findings.fail(kinds.LOST_TURNS, answers.find_log_errors(setup, transcript))
        changed = answers.find_changed_answers(client, transcript, range(slept))
        findings.fail(kinds.CHANGED, changed)
        client.run(transcript)
        awake = answers.find_differences(transcript, calm, slept)
        findings.fail(kinds.AWAKE, [each.text for each in awake if each.in_text])
        findings.fail(kinds.LOST_TURNS, answers.find_log_errors(setup, transcript))
        client.delete_sessions(transcript)
    except NotServedError as error:
        findings.fail(kinds.NOT_SERVED, [f"{transcript.name}: {error}"])


def ask_contested(
    setup: Setup,
    client: FaultClient,
    contest: Contest,
    calm: Sequence[str],
    findings: Findings,
    *,
    may_lose: bool = False,
) -> None:
    """Compare a contended session and its forks with an undisturbed replay of their logs.

    The parent is deleted while its forks go on. `may_lose`: acknowledged turns may be missing.
    """
    findings.fail(kinds.NOT_SERVED, contest.failures)
    if not contest.session:
        return
    try:
        for number, session in enumerate([contest.session, *contest.forks]):
            log = answers.read_log(setup, session)
            if not number and not may_lose:
                findings.fail(kinds.LOST_TURNS, contest.log_errors(log))
            answer = _ask(client, session, f"{contest.name}-{number}-question")
            findings.fail(kinds.CONTENDED, replay(calm, contest, log, answer))
            client.delete(session, f"{contest.name}-{number}-delete")
    except (NotServedError, KvrecallError) as error:
        findings.fail(kinds.NOT_SERVED, [f"{contest.name}: {error}"])


def go_on(
    setup: Setup, client: FaultClient, talk: Talk, calm: Talk, end: int | None = None
) -> Findings:
    """Go on with a talk up to number `end`, and check what is new."""
    start = len(talk.answers)
    try:
        talk.run(client, end)
    except NotServedError as error:
        found = Findings()
        found.fail(kinds.NOT_SERVED, [f"{talk.name}: {error}"])
        return found
    return check_talk(setup, client, talk, calm, start)


def check_talk(setup: Setup, client: FaultClient, talk: Talk, calm: Talk, start: int) -> Findings:
    """Compare a talk with its session's log, with what is stored, and with an undisturbed one.

    Answers are compared from number `start` on.
    """
    found = Findings()
    found.fail(kinds.IN_TALKS, talk.find_differences(calm, start))
    log = answers.read_log(setup, talk.answers[-1].session)
    found.fail(kinds.LOST_TURNS, talk.errors + talk.log_errors(log))
    try:
        found.fail(kinds.CHANGED, talk.stored_errors(client))
    except NotServedError as error:
        found.fail(kinds.NOT_SERVED, [f"{talk.name}: {error}"])
    return found


def delete_talks(client: FaultClient) -> None:
    """Delete all sessions of the talks' tenant. Raises NotServedError."""
    while page := client.retry(lambda each: each.list_sessions()).sessions:
        for session in page:
            client.delete(session.id, f"delete-{session.id}")


def _ask(client: FaultClient, session: str, key: str) -> Json:
    messages = [{"role": "user", "content": QUESTION}]
    return client.retry(
        lambda each: asdict(each.turn(session, messages, max_tokens=12, queue=True, key=key))
    )
