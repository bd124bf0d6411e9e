"""The dashboard of the service as its clients see it: rates, errors, times, saturation."""

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

# A fault has no series before it first occurs.
SERVICE_FAILURES = "({} or vector(0))".format(
    rate("turn_failures_total", GATEWAY + ', fault="service"')
)

PANELS = (
    Panel(
        "Turns",
        "Committed turns by how they ended. A fall to zero with requests coming in: see Failed turns.",
        Unit.PER_SECOND,
        (Query(rate("turns_total", GATEWAY, "finish_reason"), "{{finish_reason}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Failed turns",
        "Turns that were not committed. `service` is ours and has a runbook by code; `capacity` asks for "
        "workers or higher limits; `client` is for the callers to mend.",
        Unit.PER_SECOND,
        (Query(rate("turn_failures_total", GATEWAY, "fault", "code"), "{{fault}}: {{code}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Turns that the service failed",
        "Share of all turns but those of clients' mistakes and refusals. Over 5% an alert fires: look at "
        "the codes in Failed turns.",
        Unit.RATIO,
        (
            Query(
                f"{SERVICE_FAILURES} / ({rate('turns_total', GATEWAY)} + {SERVICE_FAILURES})",
                "failed",
            ),
        ),
        warn_above=0.05,
    ),
    Panel(
        "Time to first token",
        "From a turn's arrival. Over a few seconds: p95 of each phase shows which one.",
        Unit.SECONDS,
        tuple(
            Query(
                quantile(share, "time_to_first_token_seconds", GATEWAY, "after"),
                f"p{share * 100:g} after a {{{{after}}}}",
            )
            for share in (0.5, 0.95, 0.99)
        ),
        warn_above=5,
    ),
    Panel(
        "Time per output token",
        "Of each answer its mean. When it rises with Sessions decoded together (Workers), more workers help.",
        Unit.SECONDS,
        tuple(
            Query(quantile(share, "time_per_output_token_seconds", GATEWAY), f"p{share * 100:g}")
            for share in (0.5, 0.95)
        ),
    ),
    Panel(
        "Duration of turns",
        "Turns by their duration; exemplars lead to traces. A second band above the first: some turns "
        "wait, are prefilled again, or repair.",
        Unit.SECONDS,
        (
            Query(
                f"sum by (le) (increase(kvrecall_turn_seconds_bucket{{{GATEWAY}}}[$__rate_interval]))",
                "{{le}}",
            ),
        ),
        Kind.HEATMAP,
    ),
    Panel(
        "Where a turn's time goes",
        "Mean seconds of each phase per committed turn. The largest is the one to work on.",
        Unit.SECONDS,
        (
            Query(
                f"{rate('turn_phase_seconds_sum', GATEWAY, 'phase')} "
                f"/ on () group_left () {rate('turns_total', GATEWAY)}",
                "{{phase}}",
            ),
        ),
        Kind.STACKED,
    ),
    Panel(
        "p95 of each phase",
        "`waiting` and `queued` ask for capacity, `repair` for other repair settings, `prefill` comes "
        "from long turns, `rebuild` from lost pages.",
        Unit.SECONDS,
        (Query(quantile(0.95, "turn_phase_seconds", GATEWAY, "phase"), "{{phase}}"),),
    ),
    Panel(
        "Tokens",
        "Tokens of committed turns, and what workers prefilled for them. Much more prefilled than "
        "prompt: sessions move or lose pages; see Takeovers and Lost pages. Settled: tokens of answers, "
        "computed again as blocks. Ahead: of prompts, while their tools ran; computed ones that no turn used were "
        "of other results than the tools' outputs. Dropped: earlier reasoning that the chat template leaves out.",
        Unit.PER_SECOND,
        (
            Query(rate("tokens_total", GATEWAY, "kind"), "{{kind}}"),
            Query(rate("worker_prefilled_tokens_total", WORKER), "prefilled"),
            Query(rate("worker_settled_tokens_total", WORKER, "when"), "settled in the {{when}}"),
            Query(rate("worker_ahead_tokens_total", WORKER, "event"), "ahead, {{event}}"),
            Query(rate("worker_dropped_tokens_total", WORKER), "dropped"),
        ),
    ),
    Panel(
        "Tokens not prefilled again",
        "What sessions had before their turns: what a stateless server would compute each time. Low "
        "with long conversations: clients begin new sessions instead of continuing theirs.",
        Unit.PER_SECOND,
        (Query(rate("remembered_tokens_total", GATEWAY), "remembered"),),
    ),
    Panel(
        "Saturation",
        "Running and waiting turns of those allowed. At 100% turns are refused: add workers, or raise "
        "the limits while the workers' load is low.",
        Unit.RATIO,
        tuple(
            Query(
                f"sum(kvrecall_turns_{kind}{{{GATEWAY}}}) "
                f'/ sum(kvrecall_turns_limit{{{GATEWAY}, kind="{kind}"}})',
                kind,
            )
            for kind in ("running", "waiting")
        ),
        warn_above=0.9,
    ),
    Panel(
        "Size of turns",
        "p95 of the tokens that clients send and receive in a turn. Large prompts explain slow first tokens.",
        Unit.COUNT,
        (Query(quantile(0.95, "turn_tokens", GATEWAY, "kind"), "{{kind}}"),),
    ),
    Panel(
        "Sessions",
        "Sessions of the catalog. Paused ones that only grow: clients do not send the results of their tools.",
        Unit.COUNT,
        (Query(f"max by (state) (kvrecall_sessions{{{GATEWAY}}})", "{{state}}"),),
    ),
    Panel(
        "Workers that answer",
        "Workers that at least one gateway reaches. Fewer than deployed: see the alert KvrecallWorkerDown.",
        Unit.COUNT,
        (Query(f"sum(max by (worker) (kvrecall_worker_up{{{GATEWAY}}}))", "workers"),),
        Kind.NUMBER,
    ),
    Panel(
        "HTTP requests",
        "Requests by route and status. 429: capacity or quotas; 5xx: the codes are in Failed turns.",
        Unit.PER_SECOND,
        (
            Query(
                rate("http_requests_total", GATEWAY, "method", "route", "status"),
                "{{method}} {{route}} {{status}}",
            ),
        ),
    ),
    Panel(
        "p95 of HTTP requests",
        "Time to the beginning of the response. Slow routes other than turns point to the catalog.",
        Unit.SECONDS,
        (
            Query(
                quantile(0.95, "http_request_seconds", GATEWAY, "method", "route"),
                "{{method}} {{route}}",
            ),
        ),
    ),
)

OVERVIEW = Board("overview", "kvrecall: overview", "Rates, errors, times, saturation.", PANELS)
