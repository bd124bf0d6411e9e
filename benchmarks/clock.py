"""The clock of benchmarks that time one computation."""

import time
from collections.abc import Callable

import torch


def clock(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of a run: CPU time of the process on a CPU, time until the device is done elsewhere."""
    if device.type == "cpu":
        started = time.process_time()
        run()
        return time.process_time() - started
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started
