"""Tests of the scheduler and of jobs that hold for one process, on two ranks: what may bring ranks out of step.

Jobs at the same time, cancellations at any moment, swaps and preemption, releases by time, evictions,
repairs, prefill ahead, settling, opening in place of running jobs, and pages that one rank alone has lost.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.scheduler import test_fairness
from tests.workers.scheduler.test_cancellation import (
    test_a_caller_may_cancel_at_any_moment,
    test_a_cancelled_turn_frees_its_slot_and_is_undone_by_the_next_open,
    test_an_error_in_one_turn_ends_that_turn_alone,
    test_deleting_a_session_ends_its_turn_and_frees_slot_and_rows,
)
from tests.workers.scheduler.test_fairness import (
    test_a_preempted_turn_can_be_cancelled,
    test_background_turns_wait_for_all_others_and_give_up_their_slots,
)
from tests.workers.scheduler.test_idle import (
    test_a_session_is_not_released_while_a_job_of_it_runs_or_waits,
    test_an_idle_session_is_released_and_continues_as_if_it_had_not_been,
)
from tests.workers.scheduler.test_isolation import (
    test_a_session_that_cannot_be_sampled_fails_and_the_others_get_the_same_tokens,
)
from tests.workers.scheduler.test_scheduler import (
    test_more_sessions_than_slots_generate_the_same_as_with_a_slot_each,
    test_sampling_is_the_same_alone_and_in_a_batch,
)
from tests.workers.tasks.test_ahead import (
    test_a_cancelled_computation_has_the_session_opened_again,
    test_a_session_that_was_swapped_out_meanwhile_goes_on,
    test_it_ends_behind_a_block_when_a_turn_comes,
)
from tests.workers.tasks.test_open import (
    test_a_log_that_is_too_short_restores_no_page,
    test_a_rebuild_promotes_the_rows_of_logged_repairs_again,
    test_a_released_session_frees_slot_and_memory,
    test_a_session_that_lost_pages_is_refused_and_rebuilt,
)
from tests.workers.tasks.test_settling import (
    test_rows_from_before_the_first_eviction_stay,
    test_settling_twice_changes_nothing,
)

__all__ = [
    "test_a_caller_may_cancel_at_any_moment",
    "test_a_cancelled_computation_has_the_session_opened_again",
    "test_a_cancelled_turn_frees_its_slot_and_is_undone_by_the_next_open",
    "test_a_log_that_is_too_short_restores_no_page",
    "test_a_preempted_turn_can_be_cancelled",
    "test_a_rebuild_promotes_the_rows_of_logged_repairs_again",
    "test_a_released_session_frees_slot_and_memory",
    "test_a_session_is_not_released_while_a_job_of_it_runs_or_waits",
    "test_a_session_that_cannot_be_sampled_fails_and_the_others_get_the_same_tokens",
    "test_a_session_that_lost_pages_is_refused_and_rebuilt",
    "test_a_session_that_was_swapped_out_meanwhile_goes_on",
    "test_an_error_in_one_turn_ends_that_turn_alone",
    "test_an_idle_session_is_released_and_continues_as_if_it_had_not_been",
    "test_background_turns_wait_for_all_others_and_give_up_their_slots",
    "test_deleting_a_session_ends_its_turn_and_frees_slot_and_rows",
    "test_it_ends_behind_a_block_when_a_turn_comes",
    "test_more_sessions_than_slots_generate_the_same_as_with_a_slot_each",
    "test_rows_from_before_the_first_eviction_stay",
    "test_sampling_is_the_same_alone_and_in_a_batch",
    "test_settling_twice_changes_nothing",
]


@pytest.mark.parametrize(("method", "at"), [("snapkv", 0), ("icecache", 1), ("loopserve", 5)])
def test_a_preempted_turn_says_the_same(
    method: str, at: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Preempted before its prefill, after it, and while it decodes."""
    test_fairness.test_a_preempted_turn_says_the_same(method, at, make_worker, words)
