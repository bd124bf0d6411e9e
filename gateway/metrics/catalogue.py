"""The gateway's metric families. The site's page of metrics is made from them."""

from typing import get_args

from kvrecall.domain.tool_events import ToolEventType
from kvrecall.metrics import buckets
from kvrecall.metrics.family import Family, counter, gauge, histogram
from services.catalog.observed import Kind

# Known values of labels: their series are there before the first event.
TURN_ENDS = ("stop", "length", "tool_calls", "appended")
FAULTS = ("client", "capacity", "service")
TRIGGERS = ("tool_call", "tool_delta", "tool_result", "last_output", "turn")
STATES = ("idle", "paused")
CATALOG_CALLS = get_args(Kind)
TOOL_EVENTS = tuple(ToolEventType)

HTTP = (
    counter(
        "http_requests_total",
        "HTTP requests; the route is `unmatched` where there is none, or the request was refused before.",
        method=(),
        route=(),
        status=(),
    ),
    histogram(
        "http_request_seconds",
        "Time to the beginning of a response; of a stream, too.",
        buckets.TURN,
        method=(),
        route=(),
    ),
    gauge("http_in_flight", "HTTP requests that are being answered."),
    counter("grpc_calls_total", "gRPC calls, by the name of their status.", method=(), status=()),
    gauge("event_streams", "Streams of events that clients have open."),
    counter(
        "ignored_members_total",
        "Parts of requests that were left out or replaced, by member and kind: the first that come.",
        member=(),
    ),
    counter("replayed_answers_total", "Answers repeated for an idempotency key, not computed."),
)
TURNS = (
    counter("turns_total", "Turns committed.", finish_reason=TURN_ENDS),
    counter(
        "turns_not_durable_total",
        "Turns committed with rows in memory only: if their worker dies, they are prefilled again.",
    ),
    counter(
        "turn_failures_total",
        "Turns not committed, by the error's code and by who has to act.",
        code=(),
        fault=FAULTS,
    ),
    counter("turn_retries_total", "Turns tried again in another worker.", code=()),
    histogram(
        "turn_seconds",
        "Time of a turn from its arrival to its commit.",
        buckets.TURN,
        finish_reason=TURN_ENDS,
    ),
    histogram(
        "time_to_first_token_seconds",
        "Time from a turn's arrival to its first token; `after` what the turn came.",
        buckets.FIRST_TOKEN,
        after=("turn", "pause"),
    ),
    histogram(
        "time_per_output_token_seconds",
        "Time between the tokens of an answer, the mean of each answer.",
        buckets.OUTPUT_TOKEN,
    ),
    histogram("turn_phase_seconds", "Time in a turn's phases.", buckets.WORK, phase=()),
    histogram("turn_tokens", "Tokens of a turn.", buckets.TOKENS, kind=("prompt", "output")),
    counter("tokens_total", "Tokens of committed turns.", kind=("prompt", "output")),
    counter(
        "computed_tokens_total",
        "Tokens that workers computed for this gateway, however their jobs ended; rates count these.",
        kind=("prefilled", "decoded", "repaired", "settled"),
    ),
    counter(
        "grammar_seconds_total",
        "CPU seconds of compiling grammars for their checks; rates count these as well.",
    ),
    counter(
        "remembered_tokens_total",
        "Tokens that sessions had before their turns, which were not prefilled again.",
    ),
    gauge("turns_running", "Turns that are running."),
    gauge("turns_waiting", "Turns that wait for others to end."),
    gauge("turns_limit", "The most turns that may run and wait.", kind=("running", "waiting")),
    counter("quota_refusals_total", "Requests refused because a tenant's quota is reached."),
    histogram("fidelity_kl_nats", "Divergence from the compared session, per turn.", buckets.NATS),
    histogram(
        "fidelity_top1_ratio",
        "Share of tokens that the compared session finds most probable as well, per turn.",
        buckets.RATIOS,
    ),
)
SESSIONS = (
    gauge(
        "sessions",
        "Sessions of the catalog between turns; every gateway shows the same.",
        state=STATES,
    ),
    counter(
        "takeovers_total",
        "Openings of a session in a worker, by reason: its first use in this process, a worker "
        "that was lost, another gateway that had it, a failed turn, a move.",
        reason=("first_use", "worker_lost", "other_gateway", "rollback", "move"),
    ),
    counter(
        "stale_epochs_total",
        "Writes of a former owner that were fenced off.",
        where=("catalog", "worker"),
    ),
    counter("claims_lost_total", "Claims on a session that another process took over."),
    gauge("dead_pages", "Pages that no session has any more and that are not deleted yet."),
    gauge(
        "held_pages",
        "Pages of workers that no session has, and that are too many to be deleted without a person: "
        "the catalog may have lost their sessions.",
    ),
    histogram("fork_seconds", "Time of a fork.", buckets.WORK, at=("last", "earlier")),
    histogram("move_seconds", "Time of a move to another worker.", buckets.WORK),
    histogram("rebuild_seconds", "Time of computing missing pages again.", buckets.WORK),
    counter(
        "prefix_lookups_total",
        "First turns of sessions, by whether pages of their prompt were stored already.",
        result=("hit", "miss"),
    ),
    counter("prefix_shared_tokens_total", "Tokens of prompts whose pages were stored already."),
    gauge("worker_up", "1 if this gateway reaches the worker. Aggregate with max.", worker=()),
)
REPAIRS = (
    histogram("repair_seconds", "Time of a repair.", buckets.WORK, trigger=TRIGGERS),
    histogram(
        "repair_scanned_ratio", "Share of the candidates that a repair scored.", buckets.RATIOS
    ),
    counter("repair_candidate_tokens_total", "Evicted tokens at repairs.", trigger=TRIGGERS),
    counter("repair_scored_tokens_total", "Evicted tokens that repairs scored.", trigger=TRIGGERS),
    counter("repair_promoted_tokens_total", "Tokens that repairs brought back.", trigger=TRIGGERS),
    counter(
        "repair_demoted_rows_total",
        "Rows per KV head that left the active set in exchange.",
        trigger=TRIGGERS,
    ),
    counter("repair_read_bytes_total", "Bytes of stored rows read by repairs.", trigger=TRIGGERS),
    counter("repairs_cut_total", "Repairs ended early by a deadline or a turn.", trigger=TRIGGERS),
    counter("repair_failures_total", "Repairs that failed.", code=()),
    counter(
        "repairs_between_turns_total",
        "Repairs between turns by what came first: their end or the next turn.",
        first=("end", "turn"),
    ),
    counter("repairs_left_out_total", "Due repairs that had not begun when a turn came."),
    gauge("repairs_running", "Repairs that are running."),
    histogram(
        "pause_seconds", "Time from a turn that calls tools to the next turn.", buckets.PAUSE
    ),
    histogram(
        "repair_lead_seconds",
        "Time from the end of the last repair to the arrival of the next turn.",
        buckets.PAUSE,
    ),
    counter(
        "tool_events_total",
        "Clients' reports on tool calls; late ones came after the result and changed nothing.",
        type=TOOL_EVENTS,
        late=("false", "true"),
    ),
    counter("pauses_timed_out_total", "Pauses ended by the time limit of a tool call."),
)
EPISODES = (
    counter("episode_matches_total", "Turns matched to an episode."),
    counter("episode_switches_total", "Turns that made another episode active."),
    counter("episode_moved_rows_total", "Rows loaded by switches."),
    counter("episode_moved_bytes_total", "Bytes loaded by switches."),
    counter(
        "episode_failures_total", "Steps of episodes that could not be done.", step=(), code=()
    ),
    histogram("episode_build_seconds", "Time of building episodes.", buckets.WORK),
)
CATALOG = (
    histogram("catalog_seconds", "Time of calls of the catalog.", buckets.IO, op=CATALOG_CALLS),
    counter("catalog_errors_total", "Calls that the catalog failed.", op=CATALOG_CALLS),
    gauge(
        "catalog_up",
        "1 if the catalog answered the last scrape's question within 2 seconds, 0 if it did not: "
        "then what this page says of sessions is what was known before.",
    ),
    gauge(
        "catalog_full",
        "1 if the catalog stores no more, as its disk or memory is nearly full; deletions go on.",
    ),
)
GATEWAY: tuple[Family, ...] = (
    *HTTP,
    *TURNS,
    *SESSIONS,
    *REPAIRS,
    *EPISODES,
    *CATALOG,
)
