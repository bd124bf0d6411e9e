"""Which job is next, and which gives up its slot: tenants get turns by tokens, not by arrival."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvrecall.domain.fairness.bound import has_room
from kvrecall.domain.fairness.fair_shares import FairShares
from kvrecall.domain.fairness.share import DECODED_TOKENS, STEP_TOKENS, Share
from workers.scheduler.job import Job, SlotWork

# A lone tenant's share of the jobs that a worker takes.
_TENANT_SHARE = 0.75
# So long a block waits for a tenant that has had less: while a read, a write or a text of it goes on.
# So it does after that tenant has opened a session, whose turn comes next.
# (Anticipatory scheduling, Iyer and Druschel 2001.)
MOMENT_SECONDS = 0.05
# So many tokens ahead in service, a tenant gives up a slot, however few it holds.
_QUANTUM_TOKENS = 512


class FairOrder:
    """The order of a scheduler's jobs. Only its thread touches it.

    Every step is charged to the tenant whose job it is. The tenant with the least service is next,
    and within a tenant the flow with the least.
    """

    def __init__(self) -> None:
        self._shares = FairShares()
        self._opened: dict[str, float] = {}  # when tenants opened their last session

    def has_room(self, job: Job, jobs: Collection[Job], places: int) -> bool:
        """Check if the job may be one more of the `jobs`, of which there are `places`."""
        held = sum(other.share.tenant == job.share.tenant for other in jobs)
        return has_room(held, len(jobs), places, _TENANT_SHARE, job.share.weight)

    def enter(self, job: Job) -> None:
        """Add a job that is queued."""
        self._shares.enter(job.share)

    def leave(self, job: Job) -> None:
        """Remove a job that has ended."""
        self._shares.leave(job.share)
        now = time.monotonic()
        self._opened = {each: at for each, at in self._opened.items() if _is_recent(at, now)}
        if job.opens:
            self._opened[job.share.tenant] = now

    def charge_decoding(self, jobs: Sequence[Job]) -> None:
        """Charge a step of decoding to the jobs in it."""
        self._shares.charge((job.share, STEP_TOKENS / len(jobs)) for job in jobs)

    def charge(self, job: Job, tokens: int) -> None:
        """Charge a step that passed so many tokens; one on the host alone takes its time, too."""
        least = STEP_TOKENS if job.opens else DECODED_TOKENS
        self._shares.charge([(job.share, max(tokens, least))])

    def heads(self, queued: Iterable[Job], busy: Collection[str]) -> list[Job]:
        """Return the first queued job of each session that is not busy, in their order.

        Of a tenant's, those that were preempted come first: their rows fill the host's memory.
        """
        heads: dict[str, Job] = {}
        for job in queued:
            if job.session not in busy:
                heads.setdefault(job.session, job)

        def rank(job: Job) -> tuple[bool, float, bool, float]:
            background, tenant, flow = self._shares.rank(job.share)
            return background, tenant, job.running is None, flow

        return sorted(heads.values(), key=rank)

    def next_step(self, active: Sequence[Job]) -> Job | None:
        """Choose the job whose step is next beside decoding; the first of equals.

        None if there is none, or while another tenant that has had less decodes, or waits for the
        host for a moment: a block keeps all others waiting for as long as it takes.
        """
        ready = [job for job in active if job.decoding is None and job.waiting is None]
        if not ready:
            return None
        chosen = min(ready, key=lambda job: self._shares.rank(job.share))
        now = time.monotonic()
        soon = [job.share for job in active if _steps_soon(job, now)]
        soon += [Share(tenant) for tenant, at in self._opened.items() if _is_recent(at, now)]
        owed = any(self._precedes(share, chosen.share) for share in soon)
        return None if owed else chosen

    def choose_preempted(
        self, job: Job, active: Iterable[Job], fixed: Collection[str] = ()
    ) -> Job | None:
        """Choose a running job that gives up its slot to this one; None if none has to.

        `fixed`: sessions whose jobs hold slots that cannot be taken.

        Background work does for other work. So does a tenant that has had as much as another, and
        holds more slots than the other would with one of them, each by its weight; and one that is
        far ahead in service.
        """
        running = [other for other in active if isinstance(other.work, SlotWork)]
        held = Counter(other.share.tenant for other in running)
        candidates = [
            other
            for other in running
            if other.waiting is None
            and other.session not in fixed
            and self._yields(other, job, held)
        ]
        return max(
            candidates,
            key=lambda other: (self._shares.rank(other.share)[:2], other.submitted),
            default=None,
        )

    def _precedes(self, share: Share, chosen: Share) -> bool:
        """Check if the block of chosen work waits for a step of other: of a tenant with less."""
        if share.background and not chosen.background:
            return False
        return self._shares.served(share) < self._shares.served(chosen)

    def _yields(self, other: Job, job: Job, held: Counter[str]) -> bool:
        theirs, ours = other.share, job.share
        if theirs.background != ours.background:
            return theirs.background
        if theirs.tenant == ours.tenant:
            return False
        has = held[theirs.tenant] / theirs.weight
        would_have = (held[ours.tenant] + 1) / ours.weight
        ahead = self._shares.served(theirs) - self._shares.served(ours)
        return ahead > _QUANTUM_TOKENS or (ahead >= 0 and has > would_have)


def _steps_soon(job: Job, now: float) -> bool:
    """Check if a job decodes, or waits for what takes a moment."""
    if job.waiting is not None:
        return _is_recent(job.waiting_since, now)
    return job.decoding is not None


def _is_recent(at: float, now: float) -> bool:
    return now - at < MOMENT_SECONDS
