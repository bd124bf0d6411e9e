"""Failures of ranks, as the others learn of them."""


class PeerFailed(Exception):
    """Another rank's step has failed, so this rank's step ends as well; its end says why."""

    def __init__(self) -> None:
        super().__init__("the step failed on another rank")


class GroupLost(BaseException):
    """A rank is gone or does not answer: no job can go on, and the process ends.

    No `Exception`, so that nothing takes it for the failure of one job.
    """
