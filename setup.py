"""Native code of the server: built where there is a C++ compiler, left out where there is none.

All else about the distribution is in pyproject.toml. Each level of instructions is a file of its own, of
which a worker opens the best that its CPU has (workers/native/library.py).
"""

import platform

from setuptools import Extension, setup

FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-pthread",
    "-g0",
]
HEADERS = (
    "codes",
    "delta",
    "descent",
    "draw",
    "head",
    "products",
    "rows",
    "search",
    "team",
    "vectors",
)
LEVELS: dict[str, list[str]] = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma"]
    LEVELS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]

setup(
    ext_modules=[
        Extension(
            f"workers.native.attend_{level}",
            ["workers/native/attend.cpp", "workers/native/decode.cpp"],
            depends=[f"workers/native/{name}.h" for name in HEADERS],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ]
)
