"""The images' recipe: lint, users, signals, health checks, and what is copied into them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.extras import MODULES
from tests.operations.catalogue import ROOT
from tests.operations.image import DOCKERFILE, read_environment, read_stages
from tests.operations.settings import find_unknown

TARGETS = ("gateway", "worker", "worker-cuda")


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Instructions and their values, as a builder reads them."""
    copy = tmp_path_factory.mktemp("image") / "Dockerfile"
    shutil.copy(DOCKERFILE, copy)
    return [
        {"instruction": each["instruction"], "value": each["value"]}
        for each in DockerfileParser(str(copy)).structure
    ]


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_as_an_unprivileged_user_and_gets_signals(target: str) -> None:
    stages = "".join(read_stages(target))
    assert re.findall(r"^USER (.+)$", stages, re.MULTILINE) == ["10001:10001"]
    assert stages.index("USER 10001") > stages.rindex("COPY --from=build")
    assert re.findall(r"^STOPSIGNAL (.+)$", stages, re.MULTILINE) == ["SIGTERM"]
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", stages, re.MULTILINE)
    assert json.loads(entry) == ["kvrecall"], "no shell, so that the process gets the signals"
    (command,) = re.findall(r"^CMD (.+)$", stages, re.MULTILINE)
    assert json.loads(command) == [target.split("-")[0]]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_a_health_check_of_a_port_that_it_exposes(target: str) -> None:
    stages = "".join(read_stages(target))
    (check,) = re.findall(r"^HEALTHCHECK (?:.*\\\n)*\s*CMD (.+)$", stages, re.MULTILINE)
    program, option, code = json.loads(check)
    assert (program, option) == ("python3", "-c")
    compile(code, "health check", "exec")
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/healthz", code)
    (exposed,) = re.findall(r"^EXPOSE (.+)$", stages, re.MULTILINE)
    assert port in exposed.split()


@pytest.mark.parametrize("target", TARGETS)
def test_the_variables_of_a_target_are_settings(target: str) -> None:
    found = read_environment(target)
    own = {name for name in found if name.startswith("KVRECALL_")} - {"KVRECALL_CACHE"}
    assert {"KVRECALL_DATA", "KVRECALL_LOG"} <= own
    assert find_unknown(own) == set()
    written = [found[name] for name in ("KVRECALL_DATA", "KVRECALL_CACHE", "HF_HOME", "HOME")]
    assert all(path.startswith(("/var/lib/kvrecall", "/tmp")) for path in written)


def test_a_workers_memory_is_in_large_pages() -> None:
    tunables = [read_environment(each).get("GLIBC_TUNABLES") for each in TARGETS]
    assert tunables == [None, "glibc.malloc.hugetlb=1", "glibc.malloc.hugetlb=1"]


def test_a_targets_listeners_are_those_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in read_environment("worker").items():
        if name.startswith("KVRECALL_"):
            monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.server.listen == "0.0.0.0:8421"
    assert settings.server.ops_listen == "0.0.0.0:9421"
    assert (str(settings.data), settings.log) == ("/var/lib/kvrecall", "json")


def test_the_recipe_has_no_secrets_and_no_latest(instructions: list[dict[str, str]]) -> None:
    for each in instructions:
        kind, value = each["instruction"], each["value"]
        assert kind != "ADD", value
        if kind == "FROM":
            assert ":latest" not in value
        if kind in ("ARG", "ENV"):
            assert not re.search(r"TOKEN|PASSWORD|SECRET|_KEY", value), value
    bases = {each["value"].split()[0] for each in instructions if each["instruction"] == "FROM"}
    outside = {base for base in bases if base.startswith("$") or ":" in base}
    assert outside == {"${PYTHON_IMAGE}"}, "one base, which builds without a registry replace"


def test_the_gateway_has_no_torch(tmp_path: Path) -> None:
    script = ROOT / "deploy" / "requirements.py"
    lines = subprocess.run(
        [sys.executable, str(script), "gateway", "otel"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(lines) >= set(extras["project"]["optional-dependencies"]["gateway"])
    names = {re.split(r"[\[<>=!~;]", line)[0] for line in lines}
    assert not names & {"torch", "transformers", "sentence-transformers", "accelerate"}
    assert "torch" not in MODULES["gateway"]
    refused = subprocess.run(
        [sys.executable, str(script), "gatewey"], cwd=ROOT, capture_output=True, text=True
    )
    assert "gatewey is neither an extra" in refused.stderr


def test_the_context_has_the_packages_and_little_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    taken = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = ["kvrecall", *project["tool"]["setuptools"]["packages"]["find"]["include"]]
    packages = {
        entry.name
        for entry in os.scandir(ROOT)
        if entry.is_dir()
        and any(fnmatch(entry.name, pattern) for pattern in patterns)
        and (ROOT / entry.name / "__init__.py").exists()
    }
    assert packages <= taken
    assert taken - packages == {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "deploy/requirements.py",
        "pyproject.toml",
        "setup.py",
    }
    assert all((ROOT / name).exists() for name in taken)
