"""The page of metrics: the families of gateways and workers, from their catalogues."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tables import to_table

if TYPE_CHECKING:
    from kvrecall.metrics.family import Family

INTRODUCTION = """# Metrics

Gateways show their own metrics at `GET /metrics`, workers theirs on the port of `--ops`;
`kvrecall serve` shows both on one page. Nothing is counted twice: sums over all processes add up.
What every process reports alike (`kvrecall_sessions`, `kvrecall_worker_up`,
`kvrecall_shared_tier_bytes`, `kvrecall_shared_tier_limit_bytes`) is aggregated with `max`.

- No series carries a session, a tenant, a request or a text of a client; ids of routes are their templates.
- Series with labels whose values are known start at 0. A limit that is not set is absent.
- OpenMetrics is sent to those who ask for it; histograms carry the ids of sampled traces as
  exemplars there.
- Names are kept from 0.3.0 on: one that changes is deprecated in a release, hidden in the next, and
  removed in the one after.
"""
GENAI = """
## Names of OpenTelemetry

| OpenTelemetry GenAI | here |
| --- | --- |
| `gen_ai.server.request.duration` | `kvrecall_turn_seconds` |
| `gen_ai.server.time_to_first_token` | `kvrecall_time_to_first_token_seconds` |
| `gen_ai.server.time_per_output_token` | `kvrecall_time_per_output_token_seconds` |
| `gen_ai.client.token.usage` | `kvrecall_turn_tokens` |

The boundaries of these histograms include OpenTelemetry's.
"""


def build() -> str:
    """The page's text."""
    from gateway.metrics.catalogue import GATEWAY
    from kvrecall.metrics.page import BUILD_INFO
    from workers.metrics.catalogue import WORKER

    return (
        "\n".join(
            [
                INTRODUCTION,
                "## Every process\n",
                "Beside it `process_*`, `python_*` of the Prometheus client.\n",
                _to_table([BUILD_INFO]),
                "## Gateways\n",
                _to_table(GATEWAY),
                "## Workers\n",
                "All have the label `worker` as well, the worker's registered name.\n",
                _to_table(WORKER),
            ]
        )
        + GENAI
    )


def _to_table(families: "Iterable[Family]") -> str:
    rows = [
        [f"`kvrecall_{family.name}`", family.kind, _to_labels(family), family.help]
        for family in families
    ]
    return to_table(["metric", "type", "labels", "meaning"], rows)


def _to_labels(family: "Family") -> str:
    return ", ".join(
        f"`{label}`" + (f" ({', '.join(values)})" if values else "")
        for label, values in family.labels.items()
    )
