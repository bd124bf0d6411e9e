"""The dashboard of the row store and the catalog: tiers, durability, losses."""

from observability.dashboards.panel import (
    GATEWAY,
    WORKER,
    Board,
    Panel,
    Query,
    Unit,
    quantile,
    rate,
)

HITS, MISSES = (rate(f"tier_{each}_total", WORKER, "tier") for each in ("hits", "misses"))

TIERS = (
    Panel(
        "Fill",
        "Of tiers with a limit. RAM is full by design; files, Redis and a bucket over 90% refuse "
        "pages soon: raise the limit, delete sessions, or store int8 pages.",
        Unit.RATIO,
        (
            Query(
                f"max by (worker, tier) (kvrecall_tier_bytes{{{WORKER}}} "
                f"/ kvrecall_tier_limit_bytes{{{WORKER}}})",
                "{{tier}} of {{worker}}",
            ),
            Query(
                f"max by (tier) (kvrecall_shared_tier_bytes{{{WORKER}}}) "
                f"/ max by (tier) (kvrecall_shared_tier_limit_bytes{{{WORKER}}})",
                "{{tier}}",
            ),
        ),
        warn_above=0.9,
    ),
    Panel(
        "Bytes",
        "Bytes of pages by tier. Growing without new sessions: nobody deletes idle ones.",
        Unit.BYTES,
        (
            Query(f"sum by (tier) (kvrecall_tier_bytes{{{WORKER}}})", "{{tier}}"),
            Query(f"max by (tier) (kvrecall_shared_tier_bytes{{{WORKER}}})", "{{tier}}, shared"),
        ),
    ),
    Panel(
        "Hit ratio",
        "Pages found, of those asked for, by tier. Low in RAM with slow repairs: raise --ram.",
        Unit.RATIO,
        (Query(f"{HITS} / ({HITS} + {MISSES})", "{{tier}}"),),
    ),
    Panel(
        "Bandwidth",
        "Bytes read and written a second by tier. Reads at the device's limit: raise --ram. Writes: "
        "int8 pages halve them.",
        Unit.BYTES_PER_SECOND,
        (
            Query(rate("tier_read_bytes_total", WORKER, "tier"), "read from {{tier}}"),
            Query(rate("tier_written_bytes_total", WORKER, "tier"), "written to {{tier}}"),
        ),
    ),
    Panel(
        "p99 of a tier's calls",
        "Over 0.1 s in files: a slow or failing disk. In Redis: its disk (appendfsync) or the network. "
        "A bucket takes tens of milliseconds; turns do not wait for its writes.",
        Unit.SECONDS,
        (Query(quantile(0.99, "tier_call_seconds", WORKER, "tier", "op"), "{{tier}} {{op}}"),),
    ),
    Panel(
        "Errors and refused pages",
        "Refused: the tier is full. Errors: the worker's log has the reason.",
        Unit.PER_SECOND,
        (
            Query(rate("tier_errors_total", WORKER, "tier"), "errors of {{tier}}"),
            Query(rate("tier_refused_pages_total", WORKER, "tier"), "refused by {{tier}}"),
        ),
    ),
    Panel(
        "Failed tiers",
        "1 for a tier whose last calls failed. Files stay failed until their worker is restarted.",
        Unit.COUNT,
        (
            Query(
                f"max by (worker, tier) (kvrecall_tier_failed{{{WORKER}}})",
                "{{tier}} of {{worker}}",
            ),
        ),
        warn_above=1,
    ),
)
DURABILITY = (
    Panel(
        "Turns that are not durable",
        "Their rows are in memory only: files are full or failing and no Redis takes the pages.",
        Unit.COUNT,
        (
            Query(
                f"sum(increase(kvrecall_turns_not_durable_total{{{GATEWAY}}}[$__rate_interval]))",
                "turns",
            ),
        ),
        warn_above=1,
    ),
    Panel(
        "Pending and undurable pages",
        "Pending pages wait for the lowest tier, undurable ones are in memory only. Both should fall "
        "to 0 within seconds: see Errors.",
        Unit.COUNT,
        (
            Query(
                f"max by (worker) (kvrecall_worker_pending_pages{{{WORKER}}})",
                "pending, {{worker}}",
            ),
            Query(
                f"max by (worker) (kvrecall_worker_undurable_pages{{{WORKER}}})",
                "undurable, {{worker}}",
            ),
        ),
        warn_above=1,
    ),
    Panel(
        "Lost and rebuilt pages",
        "Pages found missing or damaged, and computed again. Repeated losses: run kvrecall fsck, test the disk.",
        Unit.COUNT,
        (
            Query(
                f"sum by (worker) "
                f"(increase(kvrecall_worker_lost_pages_total{{{WORKER}}}[$__rate_interval]))",
                "lost, {{worker}}",
            ),
            Query(
                f"sum by (worker) "
                f"(increase(kvrecall_worker_rebuilt_pages_total{{{WORKER}}}[$__rate_interval]))",
                "rebuilt, {{worker}}",
            ),
        ),
    ),
    Panel(
        "Free bytes of the disk",
        "Of the disk under the files tier. Under 2 GB an alert fires: free it, or set a limit.",
        Unit.BYTES,
        (
            Query(
                f'min by (worker) (kvrecall_tier_free_bytes{{{WORKER}, tier="nvme"}})', "{{worker}}"
            ),
        ),
    ),
    Panel(
        "Tokens of shared prefixes",
        "Tokens whose pages were stored already instead of being prefilled. None though sessions "
        "begin with the same system message or tools: these differ in a character, such as a date.",
        Unit.PER_SECOND,
        (
            Query(rate("prefix_shared_tokens_total", GATEWAY), "tokens"),
            Query(rate("prefix_lookups_total", GATEWAY, "result"), "lookups: {{result}}"),
        ),
    ),
    Panel(
        "Dead bytes",
        "Of deleted pages, until a compaction frees them. Growing for hours: compactions fail, see the log.",
        Unit.BYTES,
        (Query(f"sum by (tier) (kvrecall_tier_dead_bytes{{{WORKER}}})", "{{tier}}"),),
    ),
)
CATALOG = (
    Panel(
        "p95 of the catalog's calls",
        "A turn waits for its commit. Over 0.25 s: the disk under SQLite, or Redis' appendfsync.",
        Unit.SECONDS,
        (Query(quantile(0.95, "catalog_seconds", GATEWAY, "op"), "{{op}}"),),
        warn_above=0.25,
    ),
    Panel(
        "Errors of the catalog",
        "Each fails a request. Redis is out of memory or away, or the disk is full.",
        Unit.PER_SECOND,
        (Query(rate("catalog_errors_total", GATEWAY, "op"), "{{op}}"),),
    ),
    Panel(
        "Pages that are left",
        "Dead ones, of deleted sessions, wait for workers that refuse; the gateway's log names these. "
        "Unknown ones are held where the catalog may have lost their sessions, until a person has decided.",
        Unit.COUNT,
        (
            Query(f"max(kvrecall_dead_pages{{{GATEWAY}}})", "dead"),
            Query(f"max(kvrecall_held_pages{{{GATEWAY}}})", "unknown, held"),
        ),
        warn_above=1,
    ),
)

TIERS_BOARD = Board(
    "tiers",
    "kvrecall: tiers and durability",
    "Where rows are, how fast they are read, and what a crash would cost.",
    (*TIERS, *DURABILITY, *CATALOG),
)
