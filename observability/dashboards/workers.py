"""The dashboard of the workers: load, slots, steps, memory, and how sessions move among them."""

from observability.dashboards.panel import (
    GATEWAY,
    WORKER,
    Board,
    Kind,
    Panel,
    Query,
    Unit,
    quantile,
    rate,
)

PROCESS = 'job=~"$job", instance=~"$instance"'


def _total(counter: str, labels: str, by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (increase(kvrecall_{counter}{{{labels}}}[$__rate_interval]))"


LOAD = (
    Panel(
        "Load",
        "Running and queued jobs per slot: what to scale by. Over 1 for minutes: add workers.",
        Unit.RATIO,
        (
            Query(
                f"sum by (worker) (kvrecall_worker_jobs{{{WORKER}}}) "
                f"/ sum by (worker) (kvrecall_worker_slots{{{WORKER}}})",
                "{{worker}}",
            ),
        ),
        warn_above=1,
    ),
    Panel(
        "Slots in use",
        "Idle sessions keep theirs, so 100% is normal. With many swaps it is not: raise --slots.",
        Unit.RATIO,
        (
            Query(
                f"sum by (worker) (kvrecall_worker_slots_in_use{{{WORKER}}}) "
                f"/ sum by (worker) (kvrecall_worker_slots{{{WORKER}}})",
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        "Open sessions",
        "Sessions that workers hold open. Very uneven among workers: look for one that joined late or drains.",
        Unit.COUNT,
        (Query(f"sum by (worker) (kvrecall_worker_sessions{{{WORKER}}})", "{{worker}}"),),
    ),
    Panel(
        "Busy",
        "Share of the time that the scheduler works, by kind. Near 100%: the worker is saturated.",
        Unit.RATIO,
        (
            Query(
                rate("worker_busy_seconds_total", WORKER, "worker", "kind"), "{{worker}} {{kind}}"
            ),
        ),
        Kind.STACKED,
    ),
    Panel(
        "Queued jobs",
        "Jobs that wait, by kind. Turns that wait while repairs run: lower repair_seconds.",
        Unit.COUNT,
        (
            Query(
                f'sum by (worker, kind) (kvrecall_worker_jobs{{{WORKER}, state="queued"}})',
                "{{worker}} {{kind}}",
            ),
        ),
        Kind.STACKED,
    ),
    Panel(
        "Sessions decoded together",
        "Median size of a decoding pass. 1 under load: turns do not overlap, so more slots do not help.",
        Unit.COUNT,
        (Query(quantile(0.5, "worker_batch_sessions", WORKER, "worker"), "{{worker}}"),),
    ),
    Panel(
        "p95 of steps",
        "Forward passes by kind, and filling a slot. Passes that slow down with the same load: a "
        "throttled device. Slow swaps: rows come from the disk, raise --ram.",
        Unit.SECONDS,
        (
            Query(
                quantile(0.95, "worker_step_seconds", WORKER, "worker", "kind"),
                "{{worker}} {{kind}}",
            ),
            Query(quantile(0.95, "worker_swap_seconds", WORKER, "worker"), "{{worker}} swap"),
        ),
    ),
    Panel(
        "Swaps",
        "Sessions moved into and out of slots. More than one a second: raise --slots, or add workers.",
        Unit.PER_SECOND,
        (
            Query(
                rate("worker_swaps_total", WORKER, "worker", "direction"),
                "{{worker}} {{direction}}",
            ),
            Query(rate("worker_preemptions_total", WORKER, "worker"), "{{worker}} preempted"),
        ),
    ),
)
PROCESSES = (
    Panel(
        "Device memory",
        "Of the accelerator. Reserved near the total: lower --slots or --budget.",
        Unit.BYTES,
        (
            Query(
                f"sum by (worker, kind) (kvrecall_worker_device_memory_bytes{{{WORKER}}})",
                "{{worker}} {{kind}}",
            ),
        ),
    ),
    Panel(
        "Resident memory",
        "Of every process. A worker needs its model, --ram, of which sessions hold the host cache, and the active "
        "rows; a gateway that grows is a fault.",
        Unit.BYTES,
        (
            Query(f"process_resident_memory_bytes{{{PROCESS}}}", "{{job}} {{instance}}"),
            Query(
                f"sum by (worker) (kvrecall_worker_host_cache_bytes{{{WORKER}}})",
                "{{worker}} host cache",
            ),
        ),
    ),
    Panel(
        "CPU",
        "Cores in use of every process. A gateway at one core is at its end: add another.",
        Unit.COUNT,
        (
            Query(
                f"rate(process_cpu_seconds_total{{{PROCESS}}}[$__rate_interval])",
                "{{job}} {{instance}}",
            ),
        ),
    ),
)
CLUSTER = (
    Panel(
        "p95 of calls to workers",
        "Of gateways' calls. Slow calls other than turns: the worker's scheduler is busy.",
        Unit.SECONDS,
        (Query(quantile(0.95, "worker_call_seconds", WORKER, "method"), "{{method}}"),),
    ),
    Panel(
        "p95 of forks, moves, rebuilds",
        "Each delays its session. Slow moves and rebuilds compute pages again: see Lost and rebuilt pages.",
        Unit.SECONDS,
        tuple(
            Query(quantile(0.95, f"{each}_seconds", GATEWAY), each)
            for each in ("fork", "move", "rebuild")
        ),
    ),
    Panel(
        "Takeovers and retries",
        "Sessions that workers open, by reason, and turns tried in another worker. Many by other_gateway: "
        "route a session to one gateway. worker_lost: see KvrecallWorkerDown.",
        Unit.COUNT,
        (
            Query(_total("takeovers_total", GATEWAY, "reason"), "{{reason}}"),
            Query(_total("turn_retries_total", GATEWAY, "code"), "retry: {{code}}"),
        ),
        Kind.STACKED,
    ),
    Panel(
        "Fenced writes, lost claims, failed announcements",
        "Former owners of sessions that were refused: correct, but often means that gateways or workers "
        "stall. Failed announcements: Redis does not answer the workers.",
        Unit.COUNT,
        (
            Query(_total("stale_epochs_total", GATEWAY, "where"), "fenced at the {{where}}"),
            Query(_total("claims_lost_total", GATEWAY), "claims lost"),
            Query(
                _total("worker_registry_failures_total", WORKER, "worker"),
                "{{worker}}: announcements",
            ),
        ),
        Kind.STACKED,
    ),
    Panel(
        "Versions",
        "Processes by version. More than one version for longer than an upgrade takes: it is stuck.",
        Unit.COUNT,
        (Query(f"count by (component, version) (kvrecall_build_info{{{GATEWAY}}})"),),
        Kind.TABLE,
    ),
)

WORKERS = Board(
    "workers",
    "kvrecall: workers",
    "Load, slots, memory, and how sessions move among workers.",
    (*LOAD, *PROCESSES, *CLUSTER),
    by_instance=True,
)
