"""The worker's metric families, all with the label `worker`. The site's page of metrics is made from them."""

from kvrecall.metrics import buckets
from kvrecall.metrics.family import Family, counter, gauge, histogram
from kvrecall.metrics.page import Metrics

# Known values of labels: their series are there before the first event.
JOBS = ("turn", "repair", "settle", "ahead", "build", "open", "measure", "pages")
WORK = (*JOBS, "decode", "swap")
CALLS = ("read", "write", "delete")

LOAD = (
    gauge(
        "worker_info",
        "1, with what the worker serves.",
        model=(),
        fingerprint=(),
        device=(),
    ),
    gauge("worker_draining", "1 while the worker ends and takes no new work."),
    gauge("worker_slots", "Sessions whose active rows fit on the device at once."),
    gauge(
        "worker_slots_in_use", "Slots with a session, idle ones included: not a measure of load."
    ),
    gauge("worker_sessions", "Sessions open in the worker."),
    gauge(
        "worker_jobs",
        "Jobs by kind: the load, and what to scale by.",
        kind=JOBS,
        state=("running", "queued"),
    ),
    counter(
        "worker_busy_seconds_total",
        "Time of the scheduler's thread: in steps of a kind of job (of turns: prefill, eviction and "
        "their own repair), in decoding for all sessions, in swaps.",
        kind=WORK,
    ),
    histogram(
        "worker_step_seconds",
        "Time of a forward pass: a block of one session, or a token of all that decode.",
        buckets.OUTPUT_TOKEN,
        kind=("prefill", "decode"),
    ),
    histogram(
        "worker_prefill_density",
        "Share of the rows that a sparse block attends to, mean over its sparse layers and heads.",
        buckets.RATIOS,
    ),
    histogram(
        "worker_prefill_cover",
        "Share of the attention weight on these rows, on held-out queries, mean over them.",
        buckets.COVERS,
    ),
    histogram("worker_batch_sessions", "Sessions decoded in one pass.", buckets.SESSIONS),
    counter("worker_prefilled_tokens_total", "Tokens computed in blocks, also after a loss."),
    counter(
        "worker_computed_tokens_total",
        "Tokens that passed the model for a session: in blocks, in steps of answers, to observe.",
    ),
    counter(
        "worker_settled_tokens_total",
        "Tokens of answers whose rows were computed again as the full cache has them.",
        when=("pause", "turn"),
    ),
    counter(
        "worker_ahead_tokens_total",
        "Tokens of prompts that were computed before their turn came, and those of them that a turn used.",
        event=("computed", "used"),
    ),
    counter(
        "worker_dropped_tokens_total",
        "Tokens that sessions lost when the chat template rewrote earlier turns.",
    ),
    counter(
        "worker_calls_total", "gRPC calls by their status: OK, or the error's.", method=(), code=()
    ),
    histogram("worker_call_seconds", "Time of a gRPC call.", buckets.WORK, method=()),
    counter("worker_registry_failures_total", "Announcements that Redis did not take."),
)
MEMORY = (
    counter("worker_swaps_total", "Sessions moved into and out of slots.", direction=("in", "out")),
    counter(
        "worker_preemptions_total",
        "Jobs that gave up their slots to a tenant with less, and go on when one is free.",
    ),
    histogram("worker_swap_seconds", "Time of filling a slot with a session's rows.", buckets.IO),
    gauge("worker_active_rows", "Active rows of the sessions in slots, each by its largest layer."),
    gauge("worker_budget_rows", "Budgets of the sessions in slots."),
    gauge("worker_active_bytes", "Bytes of the active rows of the sessions in slots."),
    gauge("worker_evicted_tokens", "Tokens of the sessions in slots beyond their active rows."),
    gauge("worker_promoted_tokens", "Tokens of the sessions in slots that repairs brought back."),
    counter("eviction_rows_total", "Rows evicted, each by its largest layer.", method=()),
    histogram(
        "worker_reselection_seconds",
        "Time of a re-selection of an answer's rows, with what other sessions decoded meanwhile.",
        buckets.WORK,
    ),
    counter(
        "worker_reselected_rows_total",
        "Rows that re-selections made active again, over all layers and KV heads.",
    ),
    histogram(
        "worker_retrieval_seconds",
        "Time of one step's search for rows to retrieve on the host, and of their reading.",
        buckets.OUTPUT_TOKEN,
    ),
    counter(
        "worker_retrieved_rows_total",
        "Rows that turns retrieved, over all layers and KV heads.",
    ),
    counter(
        "worker_remembered_tokens_total",
        "Tokens of other sessions whose rows turns had, by sessions with a memory.",
    ),
    counter("worker_retrieval_refused_total", "Answers that found no memory to retrieve from."),
    gauge(
        "worker_host_cache_bytes",
        "Memory of the pages that sessions hold, each once, and of their indexes: of the RAM tier's "
        "limit, three quarters of it at most.",
    ),
    counter(
        "worker_host_cache_evictions_total",
        "Sessions whose pages were dropped from memory to make room for another one's.",
    ),
    gauge(
        "worker_device_memory_bytes",
        "Memory of the accelerator: allocated, reserved, total; absent on a CPU.",
        kind=(),
    ),
)
STORAGE = (
    counter("worker_lost_pages_total", "Stored pages found missing or damaged."),
    counter("worker_rebuilt_pages_total", "Missing pages that were computed again."),
    gauge("worker_pending_pages", "Pages that are not in the lowest tier yet."),
    gauge("worker_undurable_pages", "Pages in memory only: a crash would lose them."),
    gauge(
        "tier_bytes",
        "Bytes of the worker's own tiers; in RAM of pages that sessions hold too.",
        tier=(),
    ),
    gauge("tier_limit_bytes", "Limit of a tier; absent without one.", tier=()),
    gauge("tier_free_bytes", "Bytes left on the device of a tier.", tier=()),
    gauge("shared_tier_bytes", "Bytes of a tier that workers share. Aggregate with max.", tier=()),
    gauge("shared_tier_limit_bytes", "Limit of a shared tier; absent without one.", tier=()),
    gauge(
        "tier_failed", "1 if a tier's last calls failed: a disk error, a silent server.", tier=()
    ),
    counter("tier_hits_total", "Pages found in a tier.", tier=()),
    counter("tier_misses_total", "Pages not found in a tier.", tier=()),
    counter("tier_errors_total", "Failed calls of a tier.", tier=()),
    counter("tier_refused_pages_total", "Pages that a full tier did not take.", tier=()),
    counter("tier_read_bytes_total", "Bytes read from a tier.", tier=()),
    counter("tier_written_bytes_total", "Bytes written to a tier.", tier=()),
    histogram("tier_call_seconds", "Time of a tier's calls.", buckets.IO, tier=(), op=CALLS),
    gauge("tier_dead_bytes", "Bytes of deleted pages that a compaction will free.", tier=()),
    counter("tier_compactions_total", "Segments that compactions rewrote.", tier=()),
    counter("prefetched_pages_total", "Pages read into memory before they were asked for."),
)
WORKER: tuple[Family, ...] = (*LOAD, *MEMORY, *STORAGE)


def create_metrics(worker: str = "local") -> Metrics:
    """Create the instruments of a worker of this name."""
    return Metrics(WORKER, worker=worker)
