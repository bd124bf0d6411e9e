"""The time to the first token is the sum of all phases up to it."""

from kvrecall.client._timing import seconds_to_first_token
from kvrecall.domain.phases import Phase


def test_every_phase_up_to_the_first_token_counts_but_recorded_text() -> None:
    phases = list(Phase)
    up_to_it = phases[: phases.index(Phase.FIRST_TOKEN) + 1]
    counted = [phase for phase in phases if seconds_to_first_token({phase: 1.0}) == 1.0]
    assert counted == [phase for phase in up_to_it if phase is not Phase.APPEND]
    assert seconds_to_first_token(dict.fromkeys(map(str, phases), 1.0)) == len(counted)
