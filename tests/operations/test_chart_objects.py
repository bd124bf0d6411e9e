"""Properties of the chart's objects: names that fit, settings that kvrecall knows, pods that end."""

import re
from typing import Any

import pytest
import typer
from click import Command, Context

from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.commands import app
from tests.operations.catalogue import get_all_series
from tests.operations.charts import (
    CHART,
    NAMESPACE,
    OTHER_NAMES,
    SECRETS,
    VALUES,
    Object,
    expand,
    get_component,
    get_containers,
    get_environment,
    get_one,
    get_pod,
    get_pod_labels,
    get_setting_names,
    get_workloads,
    render,
    select,
)
from tests.operations.promql import find_selectors

EVERY = pytest.mark.parametrize("values", VALUES)
# Labels that Prometheus's operator gives to the series of a ServiceMonitor.
TARGET = frozenset({"namespace", "service", "pod"})
MODELS = (
    '{"source": "pvc", "claim": "models", "name": "qwen"}',
    '{"source": "hostPath", "path": "/srv/models", "name": "/qwen"}',
    '{"source": "hub", "name": "owner/model"}',
)
STORAGE = (
    '{"type": "emptyDir", "size": "10Gi"}',
    '{"type": "hostPath"}',
    '{"type": "existingClaim", "claim": "mine"}',
)


def matches(selector: Object, labels: Any) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


@EVERY
def test_selectors_select_exactly_the_pods_of_their_component(values: str) -> None:
    objects = render(values)
    workloads = get_workloads(objects)
    assert {get_component(each) for each in workloads} >= {"gateway", "worker"}
    by_selector = [
        *((each, each["spec"]["selector"]) for each in workloads),
        *((each, {"matchLabels": each["spec"]["selector"]}) for each in select(objects, "Service")),
        *((each, each["spec"]["selector"]) for each in select(objects, "PodDisruptionBudget")),
        *((each, each["spec"]["podSelector"]) for each in select(objects, "NetworkPolicy")),
    ]
    for each, selector in by_selector:
        found = [other for other in workloads if matches(selector, get_pod_labels(other))]
        assert [get_component(other) for other in found] == [get_component(each)], each["kind"]


@EVERY
def test_services_have_the_ports_of_their_pods(values: str) -> None:
    objects = render(values, "gateway.grpc.enabled=true")
    for service in select(objects, "Service"):
        (workload,) = [
            each for each in get_workloads(objects) if get_component(each) == get_component(service)
        ]
        ports = {
            port["name"]: port["containerPort"]
            for container in get_containers(workload)
            for port in container.get("ports", ())
        }
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
    headless = get_one(objects, "Service", "worker")["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True
    for each in select(objects, "StatefulSet"):
        names = [service["metadata"]["name"] for service in select(objects, "Service")]
        assert each["spec"]["serviceName"] in names


@EVERY
def test_every_object_that_is_referred_to_is_rendered_or_named_in_the_values(values: str) -> None:
    objects = render(values)
    rendered = {(each["kind"], each["metadata"]["name"]) for each in objects}
    given = (CHART / "values.yaml").read_text() + (CHART / values).read_text()
    for workload in get_workloads(objects):
        for kind, name in find_references(workload):
            found = (kind, name) in rendered
            if kind == "Secret" and name.endswith("-tls"):
                found = name in {
                    each["spec"]["secretName"] for each in select(objects, "Certificate")
                }
            assert found or re.search(rf"\b{re.escape(name)}\b", given), (kind, name)


def find_references(workload: Object) -> set[tuple[str, str]]:
    """Kinds and names that a workload's pods need."""
    pod = get_pod(workload)
    found = {("ServiceAccount", pod["serviceAccountName"])}
    for volume in pod.get("volumes", ()):
        for kind, member, name in (
            ("ConfigMap", "configMap", "name"),
            ("Secret", "secret", "secretName"),
            ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
        ):
            if member in volume:
                found.add((kind, volume[member][name]))
    for container in get_containers(workload):
        for source in container.get("envFrom", ()):
            found.add(("ConfigMap", source["configMapRef"]["name"]))
        for variable in container.get("env") or ():
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                found.add(("Secret", reference["name"]))
    return found


@EVERY
def test_probes_ask_paths_on_ports_that_the_container_has(values: str) -> None:
    for workload in get_workloads(render(values)):
        for container in get_pod(workload)["containers"]:
            ports = {port["name"] for port in container["ports"]}
            assert {"livenessProbe", "readinessProbe"} <= container.keys()
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(name, {})
                for member in ("httpGet", "tcpSocket"):
                    if member in probe:
                        assert probe[member]["port"] in ports
            if container["name"] in ("gateway", "worker"):
                start = container["startupProbe"]
                assert start["periodSeconds"] * start["failureThreshold"] >= 1200
                assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
                assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def parse(arguments: list[str]) -> Context:
    """Parse a command line as `kvrecall` does, without running it."""
    group: Any = typer.main.get_command(app)
    command: Command = group.commands[arguments[0]]
    return command.make_context(arguments[0], list(arguments[1:]))


def check_kvrecall(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> dict[str, Settings]:
    """Parse the command lines and environments of gateways and workers; the settings by name."""
    known = get_setting_names()
    settings: dict[str, Settings] = {}
    for component in ("gateway", "worker"):
        kind = {"gateway": "Deployment", "worker": "StatefulSet"}[component]
        (container,) = get_pod(get_one(objects, kind, component))["containers"]
        environment = get_environment(objects, container)
        assert set(environment) <= known | OTHER_NAMES
        arguments = [expand(text, environment) for text in container["args"]]
        assert "$(" not in " ".join(arguments)
        assert arguments[0] == component
        given = parse(arguments).params
        assert not SECRETS & set(map(str, given.values()))
        for name in list(known):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings[component] = Settings()
    return settings


@EVERY
def test_command_lines_and_environments_are_those_of_kvrecall(
    values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(values, "gateway.grpc.enabled=true")
    settings = check_kvrecall(objects, monkeypatch)
    gateway, worker = settings["gateway"], settings["worker"]
    assert gateway.store.redis_namespace == worker.store.redis_namespace
    assert (gateway.catalog_url is None) == (worker.catalog_url is None)
    assert gateway.wire.token == worker.server.token
    assert (gateway.wire.tls_ca is None) == (worker.server.tls_cert is None)
    assert worker.server.token or worker.server.tls_client_ca
    assert gateway.api_key or gateway.access.trusted_proxies


def test_a_secret_of_keys_is_mounted_for_the_gateways_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = render("values.yaml", 'encryption.existingSecret="my-keys"')
    settings = check_kvrecall(objects, monkeypatch)
    assert str(settings["gateway"].encryption.keys_file) == "/etc/kvrecall/encryption/keys"
    assert settings["worker"].encryption.keys_file is None
    pod = get_pod(get_one(objects, "Deployment", "gateway"))
    (volume,) = [each for each in pod["volumes"] if each["name"] == "encryption"]
    assert volume["secret"]["secretName"] == "my-keys"
    assert volume["secret"]["items"] == [{"key": "keys", "path": "keys"}]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {
        "name": "encryption",
        "mountPath": "/etc/kvrecall/encryption",
        "readOnly": True,
    } in mounts


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_source_and_storage_makes_settings_of_kvrecall(
    model: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (f"worker.model={model}", f"worker.storage={storage}", 'redis.bytes="4G"')
    objects = render("values.yaml", *options, 'access.trustedProxies=["10.0.0.0/8"]')
    settings = check_kvrecall(objects, monkeypatch)
    assert settings["worker"].model in ("/models/qwen", "owner/model")
    assert settings["worker"].store.redis_bytes == 4 * 10**9
    assert [str(each) for each in settings["gateway"].access.trusted_proxies] == ["10.0.0.0/8"]
    nvme = settings["worker"].store.nvme_bytes
    assert nvme == (9 * (10 << 30) // 10 if "emptyDir" in storage else None)
    pod = get_pod(get_one(objects, "StatefulSet", "worker"))
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"data", "tmp", "models"} == mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("size", "expected"),
    [('"1Gi"', 1 << 30), ('"1.5Gi"', 3 << 29), ("4096000", 4096000), ('"2G"', 2 * 10**9)],
)
def test_sizes_become_bytes(size: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = check_kvrecall(render("values.yaml", f"worker.ramBytes={size}"), monkeypatch)
    assert settings["worker"].ram_bytes == expected


@EVERY
def test_mounts_are_volumes_and_settings_point_into_them(values: str) -> None:
    for workload in get_workloads(render(values)):
        pod = get_pod(workload)
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes |= {claim["metadata"]["name"] for claim in claims}
        mounted = set()
        for container in get_containers(workload):
            mounted |= {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == volumes


@EVERY
def test_pods_have_time_to_end(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("gateway.drainSeconds=77", "gateway.preStopSeconds=13", "worker.drainSeconds=99")
    objects = render(values, *options)
    settings = check_kvrecall(objects, monkeypatch)
    gateway = get_pod(get_one(objects, "Deployment", "gateway"))
    (sleep, seconds) = gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (sleep, seconds) == ("sleep", "13")
    assert settings["gateway"].service.drain_seconds == 77
    assert gateway["terminationGracePeriodSeconds"] >= 13 + 77 + 10
    worker = get_pod(get_one(objects, "StatefulSet", "worker"))
    assert settings["worker"].server.drain_seconds == 99
    assert worker["terminationGracePeriodSeconds"] >= 99 + 10


@EVERY
def test_a_disruption_budget_allows_one_disruption_whatever_the_number_of_pods(values: str) -> None:
    budgets = select(render(values), "PodDisruptionBudget")
    assert {get_component(each) for each in budgets} == {"gateway", "worker"}
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert "minAvailable" not in budget["spec"]


def test_a_workload_that_is_scaled_has_no_number_of_its_own() -> None:
    objects = render("values-production.yaml")
    for each in [*select(objects, "HorizontalPodAutoscaler"), *select(objects, "ScaledObject")]:
        target = each["spec"]["scaleTargetRef"]
        (scaled,) = [
            other
            for other in select(objects, target["kind"])
            if other["metadata"]["name"] == target["name"]
        ]
        assert "replicas" not in scaled["spec"]
    assert get_one(render(), "Deployment", "gateway")["spec"]["replicas"] == 2


def test_workers_are_scaled_by_jobs_of_their_slots() -> None:
    objects = render("values-production.yaml")
    (scaled,) = select(objects, "ScaledObject")
    known = {name: labels | TARGET for name, labels in get_all_series().items()}
    for trigger in scaled["spec"]["triggers"]:
        selectors = find_selectors(trigger["metadata"]["query"])
        assert selectors
        for each in selectors:
            assert each.labels <= known[each.series], each
        assert f'namespace="{NAMESPACE}"' in trigger["metadata"]["query"]
    jobs = scaled["spec"]["triggers"][0]
    assert (jobs["metricType"], jobs["metadata"]["threshold"]) == ("AverageValue", "11.20")
    (hpa,) = select(
        render("values.yaml", "worker.autoscaling.hpa.enabled=true"), "HorizontalPodAutoscaler"
    )
    (metric,) = hpa["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in known
    assert metric["pods"]["target"]["averageValue"] == "2800m"


def test_series_have_the_jobs_that_the_alerts_ask_for() -> None:
    options = ("serviceMonitor.enabled=true",)
    objects = render("values-demo.yaml", *options)
    jobs = set()
    for monitor in select(objects, "ServiceMonitor"):
        (service,) = [
            each
            for each in select(objects, "Service")
            if matches(monitor["spec"]["selector"], each["metadata"]["labels"])
        ]
        jobs.add(service["metadata"]["labels"][monitor["spec"]["jobLabel"]])
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    alerts = (CHART / "files" / "alerts.yml").read_text(encoding="utf-8")
    asked = set(re.findall(r'job="([^"]+)"', alerts))
    assert asked
    assert asked <= jobs


def test_gpus_are_limits_of_the_cuda_image() -> None:
    objects = render("values-production.yaml")
    (container,) = get_pod(get_one(objects, "StatefulSet", "worker"))["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["resources"]["limits"]["memory"] == "64Gi"
    assert "kvrecall-worker-cuda:" in container["image"]


def test_images_have_a_tag_or_a_digest() -> None:
    digest = f"mirror/kvrecall@sha256:{'0' * 64}"
    objects = render("values-demo.yaml", f'image.gateway="{digest}"', 'image.tag="9"')
    images = {
        container["name"]: container["image"]
        for workload in get_workloads(objects)
        for container in get_containers(workload)
    }
    assert images["gateway"] == digest
    assert images["worker"] == "kvrecall-worker:9"
    assert all(re.search(r":v?\d|@sha256:", image) for image in images.values())


def test_without_redis_the_gateway_is_one_process_that_names_its_worker() -> None:
    objects = render("values-minimal.yaml")
    deployment = get_one(objects, "Deployment", "gateway")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    (container,) = get_pod(deployment)["containers"]
    worker = get_environment(objects, container)["KVRECALL_WIRE__WORKER"]
    service = get_one(objects, "Service", "worker")["metadata"]["name"]
    assert worker == f"{service}-0.{service}.{NAMESPACE}.svc:8421"
    claims = [each["metadata"]["name"] for each in select(objects, "PersistentVolumeClaim")]
    assert claims == [get_pod(deployment)["volumes"][0]["persistentVolumeClaim"]["claimName"]]


def test_a_changed_setting_or_secret_rolls_the_pods() -> None:
    def annotations(*options: str) -> list[Any]:
        objects = render("values-demo.yaml", *options)
        return [
            get_one(objects, kind, component)["spec"]["template"]["metadata"]["annotations"]
            for kind, component in (("Deployment", "gateway"), ("StatefulSet", "worker"))
        ]

    assert annotations() == annotations()
    for option in ('log.level="debug"', 'redis.bundled.password="anotherPassword00"'):
        for before, after in zip(annotations(), annotations(option), strict=True):
            assert before != after


def test_without_any_secret_and_with_further_settings_the_pods_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = (
        'access={"existingSecret": "", "trustedProxies": ["10.0.0.0/8"]}',
        'workerToken.existingSecret=""',
        'tls={"mode": "secret", "gatewaySecret": "g", "workerSecret": "w"}',
    )
    bare = render("values-minimal.yaml", *options)
    assert not select(bare, "Secret")
    settings = check_kvrecall(bare, monkeypatch)
    assert settings["gateway"].api_key is None
    assert settings["worker"].server.token is None
    assert settings["worker"].server.tls_client_ca is not None
    more = '[{"name": "KVRECALL_GATEWAY__HEARTBEAT_SECONDS", "value": "7"}]'
    block = '[{"name": "KVRECALL_WORKER__BLOCK_TOKENS", "value": "512"}]'
    both = (f"gateway.extraEnv={more}", f"worker.extraEnv={block}")
    for objects in (render("values.yaml", *both), render("values-minimal.yaml", *options, *both)):
        settings = check_kvrecall(objects, monkeypatch)
        assert settings["gateway"].gateway.heartbeat_seconds == 7
        assert settings["worker"].worker.block_tokens == 512


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_the_console_is_served_where_it_is_asked_for(
    enabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = check_kvrecall(render("values.yaml", f"console.enabled={enabled}"), monkeypatch)
    assert settings["gateway"].gateway.console is (enabled == "true")
    default = check_kvrecall(render("values.yaml"), monkeypatch)
    assert default["gateway"].gateway.console is False
