"""The stages of the Dockerfile, and what a target has of them."""

import re

from tests.operations.catalogue import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def read_stages(target: str) -> list[str]:
    """The stages that a target is made of, itself last; the build stages are not among them."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    of_name: dict[str, tuple[str, str]] = {}
    for stage in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]:
        _, base, _, name = stage.split("\n", 1)[0].split()
        of_name[name] = (base, stage)
    stages: list[str] = []
    while target in of_name:
        target, stage = of_name[target]
        stages.insert(0, stage)
    return stages


def read_environment(target: str) -> dict[str, str]:
    """Variables that a target sets."""
    found: dict[str, str] = {}
    for stage in read_stages(target):
        for block in re.findall(r"^ENV ((?:.*\\\n)*.*)$", stage, re.MULTILINE):
            found.update(re.findall(r"(\w+)=(\S+)", block))
    return found
