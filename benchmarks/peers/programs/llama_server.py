"""llama.cpp's server from the wheel `xllamacpp`: `python llama_server.py GGUF THREADS CONTEXT SLOTS`.

Prints its address and serves until it is killed. `SLOTS` is a folder for the states of slots, or
empty. A script of its own: the environment has only the wheel.
"""

import json
import sys
import time
from importlib.metadata import version

import xllamacpp


def main() -> None:
    """Serve one slot."""
    path, threads, context, slots = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = int(context)
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.hostnames = ["127.0.0.1"]
    params.slot_save_path = slots
    # Without it the server copies idle slots to memory of its own: one slot needs no copy.
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    features = xllamacpp.get_system_info()
    versions = {"xllamacpp": version("xllamacpp"), "features": features}
    print(json.dumps({"address": server.listening_address, "versions": versions}), flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
