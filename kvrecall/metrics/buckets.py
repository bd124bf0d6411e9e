"""Boundaries of histograms, one tuple for each kind of quantity.

Those of first tokens, output tokens and whole turns include the boundaries of OpenTelemetry's GenAI
metrics, so that one panel can show several servers.
"""


def _parse(boundaries: str) -> tuple[float, ...]:
    return tuple(float(boundary) for boundary in boundaries.split())


# Seconds.
FIRST_TOKEN = _parse(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160"
)
OUTPUT_TOKEN = _parse(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5"
)
TURN = _parse(
    "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92 163.84 327.68"
)
# From a step of a turn to the rebuild of a long session, which may take an hour.
WORK = _parse("0.001 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 120 300 600 1800 3600")
PAUSE = _parse("0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 300 900 3600")
IO = _parse("0.00005 0.0001 0.00025 0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1")

# Other units.
TOKENS = _parse("1 4 16 64 256 1024 4096 16384 65536 262144")
RATIOS = _parse("0.01 0.05 0.1 0.25 0.5 0.75 0.9 0.99 1")
COVERS = _parse("0.5 0.8 0.9 0.95 0.98 0.99 0.995 0.999 1")
SESSIONS = _parse("1 2 4 8 16 32 64")
NATS = _parse("0.001 0.01 0.05 0.1 0.25 0.5 1 2 4")
