"""The dashboard of what sessions remember: active rows, evictions, repairs, episodes."""

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

BETWEEN = "repairs_between_turns_total"
IN_THEIR_PAUSE = GATEWAY + ', first="end"'

ROWS = (
    Panel(
        "Active rows of all that is kept",
        "Bytes on the device against all bytes that are kept of sessions: their distance is what "
        "eviction saves. They meet when budgets are too large to evict anything.",
        Unit.BYTES,
        (
            Query(f"sum(kvrecall_worker_active_bytes{{{WORKER}}})", "active"),
            Query(
                f"max(kvrecall_shared_tier_bytes{{{WORKER}}}) "
                f'or sum(kvrecall_tier_bytes{{{WORKER}, tier="nvme"}})',
                "kept",
            ),
        ),
    ),
    Panel(
        "Active rows of the budget",
        "Of the sessions in slots. Near 100% sessions evict; well below it budgets could be smaller.",
        Unit.RATIO,
        (
            Query(
                f"sum by (worker) (kvrecall_worker_active_rows{{{WORKER}}}) "
                f"/ sum by (worker) (kvrecall_worker_budget_rows{{{WORKER}}})",
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        "Evicted and promoted tokens",
        "Of the sessions in slots. Many evicted and none promoted: repairs are off, or find nothing.",
        Unit.COUNT,
        (
            Query(f"sum(kvrecall_worker_evicted_tokens{{{WORKER}}})", "evicted"),
            Query(f"sum(kvrecall_worker_promoted_tokens{{{WORKER}}})", "promoted"),
        ),
    ),
    Panel(
        "Evictions",
        "Rows evicted a second by method. Much more than tokens come in: sessions are opened again and "
        "again; see Takeovers. Rows that answers bring back count in every layer and head.",
        Unit.PER_SECOND,
        (
            Query(rate("eviction_rows_total", WORKER, "method"), "{{method}}"),
            Query(rate("worker_reselected_rows_total", WORKER), "brought back by re-selections"),
            Query(rate("worker_retrieved_rows_total", WORKER), "retrieved for one token"),
            Query(rate("worker_remembered_tokens_total", WORKER), "tokens of other sessions"),
        ),
    ),
)
REPAIRS = (
    Panel(
        "Repairs",
        "Repairs a second by what made them due. None while sessions pause: repairs are off.",
        Unit.PER_SECOND,
        (Query(rate("repair_seconds_count", GATEWAY, "trigger"), "{{trigger}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Time of repairs and pauses",
        "Repairs should be shorter than pauses. Where not: lower repair_seconds or raise --ram.",
        Unit.SECONDS,
        (
            Query(quantile(0.5, "repair_seconds", GATEWAY), "p50 of repairs"),
            Query(quantile(0.95, "repair_seconds", GATEWAY), "p95 of repairs"),
            Query(quantile(0.95, "worker_reselection_seconds", WORKER), "p95 of re-selections"),
            Query(quantile(0.5, "pause_seconds", GATEWAY), "p50 of pauses"),
            Query(quantile(0.5, "repair_lead_seconds", GATEWAY), "p50 from repair to turn"),
        ),
    ),
    Panel(
        "Repairs that ended in their pause",
        "The rest was ended by the next turn. Under 50% an alert fires: pauses are shorter than repairs.",
        Unit.RATIO,
        (
            Query(
                f"{rate(BETWEEN, IN_THEIR_PAUSE)} / {rate(BETWEEN, GATEWAY)}",
                "in the pause",
            ),
        ),
    ),
    Panel(
        "Tokens promoted per repair",
        "Zero for a trigger: its text says nothing about what was evicted, so leave that trigger out.",
        Unit.COUNT,
        (
            Query(
                f"{rate('repair_promoted_tokens_total', GATEWAY, 'trigger')} "
                f"/ {rate('repair_seconds_count', GATEWAY, 'trigger')}",
                "{{trigger}}",
            ),
        ),
    ),
    Panel(
        "Candidates that repairs score",
        "Share of the evicted tokens that were scored; p10 shows the repairs that were cut. Low: lower "
        "the cost with a larger --ram, or give repairs more seconds.",
        Unit.RATIO,
        (
            Query(
                f"{rate('repair_scored_tokens_total', GATEWAY)} "
                f"/ {rate('repair_candidate_tokens_total', GATEWAY)}",
                "of all candidates",
            ),
            Query(quantile(0.1, "repair_scanned_ratio", GATEWAY), "p10 of repairs"),
        ),
    ),
    Panel(
        "Bytes read by repairs",
        "Stored rows read to be scored. Near the tiers' bandwidth: a larger --ram.",
        Unit.BYTES_PER_SECOND,
        (Query(rate("repair_read_bytes_total", GATEWAY, "trigger"), "{{trigger}}"),),
    ),
    Panel(
        "Repairs cut, left out, failed",
        "Cut and left out: turns came first. Failed ones have a code and an alert.",
        Unit.PER_SECOND,
        (
            Query(rate("repairs_cut_total", GATEWAY), "cut"),
            Query(rate("repairs_left_out_total", GATEWAY), "left out"),
            Query(rate("repair_failures_total", GATEWAY, "code"), "failed: {{code}}"),
        ),
    ),
    Panel(
        "Pauses that timed out",
        "Tool calls whose results never came. Check the agents that call these tools.",
        Unit.COUNT,
        (
            Query(
                f"sum(increase(kvrecall_pauses_timed_out_total{{{GATEWAY}}}[$__rate_interval]))",
                "timed out",
            ),
        ),
        warn_above=1,
    ),
)
EPISODES = (
    Panel(
        "Episode switches per match",
        "Share of the matched turns that made another episode active. High: too many episodes for the topics.",
        Unit.RATIO,
        (
            Query(
                f"{rate('episode_switches_total', GATEWAY)} / {rate('episode_matches_total', GATEWAY)}",
                "switches",
            ),
        ),
    ),
    Panel(
        "Bytes moved by switches",
        "Rows loaded for the episode that becomes active; each switch delays its turn. Fewer episodes help.",
        Unit.BYTES_PER_SECOND,
        (Query(rate("episode_moved_bytes_total", GATEWAY), "moved"),),
    ),
    Panel(
        "Time of building episodes",
        "In the background, at the load of a long prefill. Raise rebuild_growth to build less often.",
        Unit.SECONDS,
        (Query(quantile(0.95, "episode_build_seconds", GATEWAY), "p95"),),
    ),
    Panel(
        "Divergence of compared turns",
        "KL divergence from the session given in fidelity.against. Rising: budgets are too small.",
        Unit.NATS,
        tuple(
            Query(quantile(share, "fidelity_kl_nats", GATEWAY), f"p{share * 100:g}")
            for share in (0.5, 0.95)
        ),
    ),
)

MEMORY = Board(
    "memory",
    "kvrecall: memory and repair",
    "What sessions keep active, and what brings evicted tokens back.",
    (*ROWS, *REPAIRS, *EPISODES),
)
