"""Tests of turns, sessions and cancellations that hold for one process, on two ranks.

Left out are those that look into the engine from the test's own thread, or have two workers at once.
"""

from tests.workers.scheduler.test_cancellation import (
    test_a_fork_that_is_cancelled_before_it_began_leaves_no_open_session,
    test_a_queued_turn_can_be_cancelled,
    test_a_refused_open_cancels_no_job,
    test_a_turn_can_be_cancelled_in_the_middle_of_its_prefill,
    test_over_capacity_is_refused,
)
from tests.workers.scheduler.test_scheduler import (
    test_four_sessions_together_generate_what_transformers_generates,
    test_pages_that_no_session_has_are_listed_and_deleted,
    test_unknown_sessions_and_stale_epochs_are_refused,
)
from tests.workers.tasks.test_turn import (
    test_a_turn_may_append_without_generating,
    test_appended_messages_count_like_generated_ones,
    test_different_recorded_text_cannot_be_compared,
    test_every_token_of_a_turn_belongs_to_one_side,
    test_max_tokens_is_limited_to_the_slots_room,
    test_phases_are_timed_and_text_is_streamed,
    test_several_turns_equal_one_long_context,
    test_two_equal_sessions_have_no_divergence,
)

__all__ = [
    "test_a_fork_that_is_cancelled_before_it_began_leaves_no_open_session",
    "test_a_queued_turn_can_be_cancelled",
    "test_a_refused_open_cancels_no_job",
    "test_a_turn_can_be_cancelled_in_the_middle_of_its_prefill",
    "test_a_turn_may_append_without_generating",
    "test_appended_messages_count_like_generated_ones",
    "test_different_recorded_text_cannot_be_compared",
    "test_every_token_of_a_turn_belongs_to_one_side",
    "test_four_sessions_together_generate_what_transformers_generates",
    "test_max_tokens_is_limited_to_the_slots_room",
    "test_over_capacity_is_refused",
    "test_pages_that_no_session_has_are_listed_and_deleted",
    "test_phases_are_timed_and_text_is_streamed",
    "test_several_turns_equal_one_long_context",
    "test_two_equal_sessions_have_no_divergence",
    "test_unknown_sessions_and_stale_epochs_are_refused",
]
