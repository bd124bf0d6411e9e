"""All dashboards, and the metrics that are on none of them."""

from types import MappingProxyType

from observability.dashboards.memory import MEMORY
from observability.dashboards.overview import OVERVIEW
from observability.dashboards.tiers import TIERS_BOARD
from observability.dashboards.workers import WORKERS

BOARDS = (OVERVIEW, MEMORY, TIERS_BOARD, WORKERS)

_OF_CLIENTS = "about single clients: asked for when one of them is looked at"
_BESIDE = "explains a panel that shows the same in a wider sense"
# Metrics that are for queries only, with the reason.
NOT_SHOWN = MappingProxyType(
    {
        "catalog_up": f"{_BESIDE}: Errors of the catalog",
        "catalog_full": f"{_BESIDE}: Errors of the catalog",
        "computed_tokens_total": f"{_BESIDE}: Tokens, with those of turns that ended early",
        "episode_failures_total": "turns run without; the codes are in the log as well",
        "episode_moved_rows_total": f"{_BESIDE}: Bytes moved by switches",
        "event_streams": _OF_CLIENTS,
        "fidelity_top1_ratio": f"{_BESIDE}: Divergence of compared turns",
        "grammar_seconds_total": _OF_CLIENTS,
        "grpc_calls_total": _OF_CLIENTS,
        "http_in_flight": f"{_BESIDE}: Saturation",
        "ignored_members_total": _OF_CLIENTS,
        "prefetched_pages_total": f"{_BESIDE}: Hit ratio",
        "quota_refusals_total": f"{_BESIDE}: Failed turns",
        "repair_demoted_rows_total": f"{_BESIDE}: Tokens promoted per repair",
        "repairs_running": f"{_BESIDE}: Queued jobs, of the workers",
        "replayed_answers_total": _OF_CLIENTS,
        "tier_compactions_total": f"{_BESIDE}: Dead bytes",
        "tool_events_total": f"{_BESIDE}: Pauses that timed out",
        "worker_calls_total": f"{_BESIDE}: p95 of calls to workers",
        "worker_computed_tokens_total": f"{_BESIDE}: Prefilled tokens",
        "worker_prefill_cover": "turns report it; a session's own choice of alpha",
        "worker_prefill_density": "turns report it; a session's own choice of alpha",
        "worker_host_cache_evictions_total": f"{_BESIDE}: Resident memory",
        "worker_retrieval_refused_total": f"{_BESIDE}: Evictions; answers go on without",
        "worker_retrieval_seconds": f"{_BESIDE}: Time of a forward pass, which contains it",
        "worker_info": "the values of the variable `worker` come from it",
    }
)
