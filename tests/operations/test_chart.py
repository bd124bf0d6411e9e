"""The Helm chart is accepted: by helm, by Kubernetes' schemas and by those of the operators."""

import hashlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented import read_lines
from tests.operations.charts import (
    APIS,
    CHART,
    ROOT,
    VALUES,
    Object,
    get_component,
    get_containers,
    get_message,
    get_one,
    get_pod,
    get_workloads,
    helm,
    render,
    run_template,
    select,
)

HERE = Path(__file__).parent
KUBERNETES = ("1.29.0", "1.31.0", "1.34.0")
CUSTOM = ("ServiceMonitor", "PrometheusRule", "ScaledObject", "Certificate", "HTTPRoute")
ROUTE = 'httpRoute={"enabled": true, "parentRefs": [{"name": "public"}]}'


@pytest.mark.parametrize("values", VALUES)
def test_helm_lints_the_chart_without_a_warning(values: str) -> None:
    found = helm("lint", "--strict", CHART, "--values", CHART / values)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "[WARNING]" not in found.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", VALUES)
def test_kubernetes_schemas_accept_every_object(values: str, version: str, tmp_path: Path) -> None:
    objects = render(values, ROUTE, 'worker.autoscaling={"hpa": {"enabled": false}}')
    built_in = [each for each in objects if each["kind"] not in CUSTOM]
    found = validate(built_in, version, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "find schema" not in found.stdout + found.stderr


def test_kubernetes_schemas_refuse_a_misspelled_field(tmp_path: Path) -> None:
    objects = render()
    for each in select(objects, "StatefulSet"):
        each["spec"]["podManagmentPolicy"] = "Parallel"
    assert validate(objects, KUBERNETES[0], tmp_path).returncode != 0


def test_the_lines_of_a_backup_name_objects_of_the_chart(tmp_path: Path) -> None:
    page = "how-to/kubernetes.md"
    lines = read_lines(page, "backup-chart") + read_lines(page, "restore-chart")
    objects = render("values-demo.yaml")
    named = set(re.findall(r"(?:deployment|statefulset)/[\w-]+", lines))
    assert named == {
        f"{each['kind'].lower()}/{each['metadata']['name']}"
        for each in get_workloads(objects)
        if get_component(each) != "worker"
    }
    redis = get_one(objects, "StatefulSet", "redis")
    name, (claim,) = redis["metadata"]["name"], redis["spec"]["volumeClaimTemplates"]
    assert f"pod/{name}-0" in lines
    assert f"exec {name}-0 --container redis" in lines
    pod = yaml.safe_load(lines.partition("<<END\n")[2].partition("\nEND\n")[0])
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    (own,) = [each for each in get_containers(redis) if each["name"] == "redis"]
    assert container["image"] == own["image"]
    assert container["volumeMounts"][0] in own["volumeMounts"]
    assert volume["name"] == claim["metadata"]["name"]
    assert volume["persistentVolumeClaim"] == {"claimName": f"{volume['name']}-{name}-0"}
    rights = get_pod(redis)["securityContext"]
    assert {name: rights.get(name) for name in pod["spec"]["securityContext"]} == pod["spec"][
        "securityContext"
    ]
    found = validate([pod], KUBERNETES[-1], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    (minimal,) = select(render("values-minimal.yaml"), "PersistentVolumeClaim")
    assert f"claim `{minimal['metadata']['name']}`" in (ROOT / "docs" / page).read_text("utf-8")


def validate(
    objects: list[Object], version: str, folder: Path
) -> "subprocess.CompletedProcess[str]":
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def check_custom() -> Any:
    """Check custom resources by the schemas of the npm packages; returns exit code and lines."""
    locked = HERE / "node_modules" / ".package-lock.json"
    if not locked.exists() or locked.stat().st_mtime < (HERE / "package-lock.json").stat().st_mtime:
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=HERE, check=True, timeout=300)

    def check(objects: list[Object]) -> tuple[int, str]:
        command = ["node", "crd_check.mjs"]
        found = subprocess.run(
            command,
            cwd=HERE,
            input=json.dumps(objects),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return found.returncode, found.stdout + found.stderr

    return check


def test_the_schemas_of_the_operators_accept_every_custom_resource(check_custom: Any) -> None:
    objects = select(render("values-production.yaml", ROUTE), *CUSTOM)
    assert {each["kind"] for each in objects} == set(CUSTOM)
    assert check_custom(objects) == (0, "")


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("ServiceMonitor", ("spec", "endpoints", 0, "port"), 8420),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expr"), None),
        ("ScaledObject", ("spec", "triggers", 0, "metadata"), "none"),
        ("Certificate", ("spec", "dnsNames"), "one"),
        ("HTTPRoute", ("spec", "hostnames"), 1),
    ],
)
def test_the_schemas_of_the_operators_refuse_wrong_ones(
    kind: str, path: tuple[Any, ...], wrong: Any, check_custom: Any
) -> None:
    found = select(render("values-production.yaml", ROUTE), kind)[0]
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = wrong
    code, lines = check_custom([found])
    assert code == 1
    assert kind in lines


def test_an_older_cluster_is_refused() -> None:
    found = helm("template", "kv", CHART, "--kube-version", "1.28.0")
    assert "incompatible with Kubernetes v1.28.0" in found.stderr


def leaves(value: Any, path: str = "") -> set[str]:
    """Paths of a tree of values: the names in mappings, to everything that is none."""
    if not isinstance(value, dict) or not value:
        return {path}
    return set().union(*(leaves(each, f"{path}.{name}") for name, each in value.items()))


def declared(schema: Object, path: str = "") -> set[str]:
    """Paths of a schema's properties; each object of it must refuse other names."""
    properties = schema.get("properties")
    if properties is None:
        return {path}
    assert schema["additionalProperties"] is False, f"{path} accepts unknown names"
    return set().union(*(declared(each, f"{path}.{name}") for name, each in properties.items()))


def test_the_schema_and_the_values_have_the_same_names() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    del schema["properties"]["global"]  # helm's own
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    names = declared(schema)
    assert {path for path in leaves(values) if not any(is_under(path, name) for name in names)} == (
        set()
    )
    assert {name for name in names if not any(is_under(path, name) for path in leaves(values))} == (
        set()
    )


def is_under(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def test_every_value_is_described_in_the_line_above_it() -> None:
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    names = {path.rpartition(".")[2] for path in leaves(yaml.safe_load("\n".join(lines)))}
    for above, line in pairwise(lines):
        name = line.strip().partition(":")[0]
        if line.strip().startswith(("#", "-")) or name not in names:
            continue
        assert above.strip().startswith("#"), f"nothing describes: {line}"


@pytest.mark.parametrize(
    "wrong",
    [
        "worker.slots=0",
        'worker.slots="four"',
        "worker.slotz=1",
        'worker.storage={"type": "nfs"}',
        'worker.storage={"nvmeBytes": "much"}',
        'worker.model={"source": "s3"}',
        'worker.gpu={"count": -1}',
        "worker.autoscaling.minReplicas=0",
        "gateway.replicas=0",
        'gateway.stickiness="cookie"',
        'redis.bundled.password="short"',
        'redis.bundled.password="with/slashes/and@signs"',
        'redis.external.catalogUrl="http://redis"',
        'workerToken.value="short"',
        'access.apiKey="short"',
        'log.level="loud"',
        "networkPolicy.redisPorts=[]",
        'tls.mode="yes"',
        'prometheusRule.overrides={"KvrecallNoWorker": {"exp": "1"}}',
        'unknown="value"',
    ],
)
def test_the_schema_refuses_wrong_values(wrong: str) -> None:
    message = get_message("values.yaml", wrong)
    assert "values don't meet the specifications of the schema" in message
    assert wrong.split("=")[0].split(".")[0] in message


NO_REDIS = 'redis.external={"enabled": false}'
NO_ACCESS = 'access.existingSecret=""'
NO_TOKEN = 'workerToken.existingSecret=""'


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([NO_REDIS], "more than one gateway need a Redis"),
        (
            [NO_REDIS, "gateway.replicas=1", "worker.replicas=2"],
            "more than one worker need a Redis",
        ),
        (
            [NO_REDIS, "gateway.replicas=1", "worker.autoscaling.hpa.enabled=true"],
            "more than one worker need a Redis",
        ),
        (["redis.bundled.enabled=true"], "choose one"),
        (['redis.external.existingSecret=""'], "needs existingSecret, or catalogUrl and storeUrl"),
        ([NO_REDIS, "redis.bundled.enabled=true"], "needs redis.bundled.password"),
        ([NO_ACCESS], "clients are authenticated"),
        ([NO_TOKEN], "gateways are authenticated"),
        (['tls.mode="secret"', 'tls.gatewaySecret="a"'], "tls.gatewaySecret and tls.workerSecret"),
        (['tls.mode="certManager"'], "tls.issuerRef.name"),
        (
            ["worker.autoscaling.keda.enabled=true", "worker.autoscaling.hpa.enabled=true"],
            "two autoscalers",
        ),
        (["worker.autoscaling.minReplicas=9"], "minReplicas is over maxReplicas"),
        (["gateway.autoscaling.minReplicas=99"], "minReplicas is over maxReplicas"),
        (['worker.model.source="hub"'], "needs worker.model.name"),
        (['worker.model.name="x"'], "set pvc, hostPath or hub"),
        (['worker.model={"source": "pvc", "name": "x"}'], "needs worker.model.claim"),
        (['worker.model={"source": "hostPath", "name": "x"}'], "needs worker.model.path"),
        (['worker.storage.type="existingClaim"'], "needs worker.storage.claim"),
        (
            ['worker.storage={"type": "existingClaim", "claim": "x"}', "worker.replicas=2"],
            "is for one worker",
        ),
        (['worker.ramBytes="6Gi"'], "over the limit of memory"),
        (['worker.model.memory="5Gi"'], "over the limit of memory"),
        (["httpRoute.enabled=true"], "needs httpRoute.parentRefs"),
        (
            ["serviceMonitor.enabled=true", 'serviceMonitor.authorization.secret="x"'],
            "needs serviceMonitor.authorization.key",
        ),
        (
            ["prometheusRule.enabled=true", 'prometheusRule.disabled=["KvrecallNothing"]'],
            "KvrecallNothing, which is no alert",
        ),
    ],
)
def test_combinations_that_would_not_work_are_refused(options: list[str], words: str) -> None:
    assert words in get_message("values.yaml", *options)


@pytest.mark.parametrize(
    ("option", "api"),
    [
        ("serviceMonitor.enabled=true", "monitoring.coreos.com/v1"),
        ("prometheusRule.enabled=true", "monitoring.coreos.com/v1"),
        ("worker.autoscaling.keda.enabled=true", "keda.sh/v1alpha1"),
        (ROUTE, "gateway.networking.k8s.io/v1"),
        ('tls={"mode": "certManager", "issuerRef": {"name": "ca"}}', "cert-manager.io/v1"),
    ],
)
def test_objects_of_an_operator_that_the_cluster_has_not_are_refused(option: str, api: str) -> None:
    others = tuple(each for each in APIS if each != api)
    message = get_message("values.yaml", option, apis=others)
    assert f"the cluster has no {api}" in message
    assert render("values.yaml", option)


def test_names_stay_short_enough_for_pods_of_a_long_release() -> None:
    long = "r" * 53
    found = helm("template", long, CHART)
    assert found.returncode == 0, found.stderr
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(found.stdout) if each]
    assert max(map(len, names)) <= 52  # a controller's revision and a pod's number follow


def test_the_chart_has_the_committed_alerts_and_dashboards() -> None:
    observability = ROOT / "observability"
    copies = {"alerts.yml": observability / "prometheus" / "alerts.yml"}
    for file in (observability / "grafana" / "dashboards").glob("*.json"):
        copies[f"dashboards/{file.name}"] = file
    assert len(copies) > 1
    files = CHART / "files"
    found = {str(file.relative_to(files)) for file in files.rglob("*") if file.is_file()}
    assert found == set(copies), "run `make chart-files`"
    for name, original in copies.items():
        same = (files / name).read_bytes() == original.read_bytes()
        assert same, f"{name} is not current: run `make chart-files`"


def test_the_rendered_dashboards_and_alerts_are_those_of_the_files() -> None:
    objects = render("values-production.yaml")
    boards = [each for each in objects if each["metadata"]["name"].startswith("kv-kvrecall-dash")]
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert len(boards) == len(files)
    for file in files:
        (text,) = [each["data"][file.name] for each in boards if file.name in each["data"]]
        assert json.loads(text) == json.loads(file.read_text(encoding="utf-8"))
    (rule,) = select(objects, "PrometheusRule")
    alerts = yaml.safe_load((CHART / "files" / "alerts.yml").read_text(encoding="utf-8"))
    assert rule["spec"]["groups"] == alerts["groups"]


def test_an_alert_can_be_changed_and_left_out() -> None:
    options = [
        "prometheusRule.enabled=true",
        'prometheusRule.disabled=["KvrecallWorkerDown"]',
        'prometheusRule.overrides={"KvrecallNoWorker": {"for": "9m", "labels": {"severity": "page"}}}',
    ]
    (rule,) = select(render("values.yaml", *options), "PrometheusRule")
    rules = {each.get("alert"): each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert "KvrecallWorkerDown" not in rules
    assert rules["KvrecallNoWorker"]["for"] == "9m"
    assert rules["KvrecallNoWorker"]["labels"] == {"severity": "page"}
    assert "kvrecall_worker_up" in rules["KvrecallNoWorker"]["expr"]


def test_runbooks_are_links_where_their_address_is_set() -> None:
    address = "https://docs.example.org/kvrecall/"
    options = ["prometheusRule.enabled=true", f'prometheusRule.runbooks="{address}"']
    (rule,) = select(render("values.yaml", *options), "PrometheusRule")
    found = [
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if "alert" in each
    ]
    assert found
    assert all(url.startswith(f"{address}docs/operations.md#kvrecall") for url in found)


def test_a_packaged_chart_has_the_same_files_each_time_and_renders_alike(tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        folder = tmp_path / str(number)
        assert helm("package", CHART, "--destination", folder).returncode == 0
        (archive,) = folder.glob("*.tgz")
        subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True, timeout=60)
        chart = folder / "kvrecall"
        files = sorted(file for file in chart.rglob("*") if file.is_file())
        digests.append(
            [
                (file.relative_to(chart), hashlib.sha256(file.read_bytes()).hexdigest())
                for file in files
            ]
        )
        for values in VALUES:
            packaged = run_template(values, chart=chart)
            assert packaged.stdout == run_template(values).stdout
    assert digests[0] == digests[1]
    assert any("alerts.yml" in str(path) for path, _ in digests[0])
