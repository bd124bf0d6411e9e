"""Compare metered tokens with computed ones over mixed requests.

python -m benchmarks.metering --url http://127.0.0.1:8420 --requests 1000
"""

import argparse
import asyncio
import json

from benchmarks.metering.mixture import measure


def main() -> None:
    """Print the counts; exit with 1 unless they are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--operations", nargs="*", default=[], help="the workers' --ops addresses")
    chosen = parser.parse_args()
    tokens, ends = asyncio.run(measure(chosen.url, chosen.requests, chosen.seed, chosen.operations))
    print(json.dumps({"computed": tokens.computed, "metered": tokens.metered, "ends": ends}))
    raise SystemExit(tokens.computed != tokens.metered)


if __name__ == "__main__":
    main()
