"""docker-compose.yml and its GPU override: valid, pinned, hardened, and in step with the code."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvrecall_server.cli.commands import app
from tests.operations.catalogue import ROOT
from tests.operations.compose import BASE, GPU, Json, MissingVariable, read_compose
from tests.operations.settings import find_unknown

SECRETS = {"KVRECALL_API_KEY": "key-for-tests", "KVRECALL_WORKER_TOKEN": "token-for-tests-0123"}
OVERRIDES = [(), (GPU,)]
PROVISIONING = ROOT / "observability" / "grafana" / "provisioning"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(params=OVERRIDES, ids=["cpu", "gpu"])
def compose(request: pytest.FixtureRequest) -> Json:
    return read_compose(SECRETS | {"KVRECALL_MODEL": "a/model"}, *request.param)


def test_the_files_have_the_form_of_compose_files() -> None:
    tool = Path(sys.executable).parent / "check-jsonschema"
    command = [tool, "--builtin-schema", "vendor.compose-spec", ROOT / BASE, ROOT / GPU]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_secrets_are_required() -> None:
    for missing in SECRETS:
        rest = {name: value for name, value in SECRETS.items() if name != missing}
        with pytest.raises(MissingVariable, match=f"{missing}: run deploy/secrets.sh first"):
            read_compose(rest)
    with pytest.raises(MissingVariable, match="KVRECALL_MODEL"):
        read_compose(SECRETS, GPU)


def test_the_script_writes_the_secrets_once(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("KVRECALL_API_KEY=chosen-by-hand\n")
    for _ in range(2):
        subprocess.run([ROOT / "deploy" / "secrets.sh", tmp_path], check=True, capture_output=True)
    lines = (tmp_path / ".env").read_text().splitlines()
    written = dict(line.split("=") for line in lines)
    assert len(lines) == 2
    assert written["KVRECALL_API_KEY"] == "chosen-by-hand"
    assert re.fullmatch("[0-9a-f]{48}", written["KVRECALL_WORKER_TOKEN"])
    key = tmp_path / "deploy" / "secrets" / "api-key"
    assert key.read_text() == "chosen-by-hand"
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600


def test_the_script_runs_again_as_a_user_without_special_rights() -> None:
    nobody = 65534 if os.getuid() == 0 else os.getuid()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "deploy" / "secrets.sh"
        for path in (script, Path(folder) / "observability" / "prometheus" / "alertmanager.yml"):
            path.parent.mkdir(parents=True)
            shutil.copy(ROOT / path.relative_to(folder), path)
        for path in (Path(folder), *Path(folder).rglob("*")):
            os.chown(path, nobody, -1)
        keys = []
        for _ in range(2):
            subprocess.run([script, folder], check=True, capture_output=True, user=nobody)
            keys.append((Path(folder) / "deploy" / "secrets" / "api-key").read_text())
    assert keys[0] == keys[1] != ""


def test_every_service_is_hardened(compose: Json) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "/tmp" in service["tmpfs"], name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service["restart"] == "unless-stopped", name


def test_images_are_pinned_and_ports_are_on_loopback(compose: Json) -> None:
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name


def test_workers_can_be_scaled(compose: Json) -> None:
    worker = compose["services"]["worker"]
    assert not {"container_name", "ports", "hostname"} & worker.keys()
    assert "--name" not in worker["command"]
    assert worker["command"][worker["command"].index("--advertise") + 1] == "auto"
    named = [each.split(":")[0] for each in worker["volumes"] if ":" in each]
    assert set(named) <= {"huggingface"}, "a data directory is of one replica"


def test_conditions_have_health_checks_and_mounts_have_sources(compose: Json) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            assert condition["condition"] == "service_healthy", name
            assert "healthcheck" in services[other], f"{name} waits for {other}"
        if "build" in service:
            assert f" AS {service['build']['target']}\n" in DOCKERFILE
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            is_file = source.startswith("./")
            assert not is_file or (ROOT / source).exists(), volume
            assert is_file or ":" not in volume or source in compose["volumes"], volume
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()


def test_variables_are_settings_and_commands_parse(compose: Json) -> None:
    commands: Any = get_command(app)
    for name in ("worker", "gateway"):
        service = compose["services"][name]
        assert find_unknown(service["environment"]) == set()
        command, *arguments = service["command"]
        context = commands.commands[command].make_context(command, arguments)
        assert context.params, name


def test_the_workers_share_a_token_with_the_gateway_and_both_urls(compose: Json) -> None:
    worker, gateway = (compose["services"][name]["environment"] for name in ("worker", "gateway"))
    assert worker["KVRECALL_SERVER__TOKEN"] == gateway["KVRECALL_WIRE__TOKEN"]
    for name in ("KVRECALL_CATALOG_URL", "KVRECALL_STORE__REDIS_URL"):
        assert worker[name] == gateway[name] == "redis://redis:6379/0"


def test_the_gpu_override_reserves_a_device_for_the_cuda_image() -> None:
    worker = read_compose(SECRETS | {"KVRECALL_MODEL": "a/model"}, GPU)["services"]["worker"]
    assert (worker["build"], worker["image"]) == (
        {"context": ".", "target": "worker-cuda"},
        "kvrecall-worker-cuda:0.3.0",
    )
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert worker["environment"]["KVRECALL_DTYPE"] == "bfloat16"
    assert "/var/lib/kvrecall/huggingface" in DOCKERFILE


def test_grafana_is_provisioned_with_the_committed_dashboards(compose: Json) -> None:
    mounts = dict(each.split(":")[1::-1] for each in compose["services"]["grafana"]["volumes"])
    source = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())
    boards = yaml.safe_load((PROVISIONING / "dashboards" / "kvrecall.yml").read_text())
    assert (source["apiVersion"], boards["apiVersion"]) == (1, 1)
    prometheus, jaeger = source["datasources"]
    assert (prometheus["uid"], prometheus["type"]) == ("prometheus", "prometheus")
    assert prometheus["isDefault"] is True, "the dashboards' variable begins with the default"
    (link,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": jaeger["uid"]}
    for url in (prometheus["url"], jaeger["url"]):
        assert url.split("/")[2].split(":")[0] in compose["services"]
    (provider,) = boards["providers"]
    folder = ROOT / mounts[provider["options"]["path"]]
    assert (folder / "overview.json").exists()
    assert mounts["/etc/grafana/provisioning"] == "./observability/grafana/provisioning"
