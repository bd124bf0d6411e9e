"""Workers on several machines in the chart: a LeaderWorkerSet whose pods join each other."""

import copy
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from kvrecall_server.app.settings import Settings
from tests.operations.charts import (
    APIS,
    OTHER_NAMES,
    Object,
    expand,
    get_message,
    get_one,
    get_texts,
    render,
    run_template,
    select,
)
from tests.operations.test_chart import KUBERNETES, validate
from tests.operations.test_chart_objects import parse
from tests.operations.test_chart_security import STRANGER, Peer, allows, connects

API = "leaderworkerset.x-k8s.io/v1"
DIVIDED = 'worker.tensorParallel={"size": 2, "machines": 2}'
LAUNCHER = {
    "LWS_GROUP_SIZE": "2",
    "LWS_LEADER_ADDRESS": "kv-kvrecall-worker-0.kv-kvrecall-worker.memory",
}
# Fields of its API, version 0.7 and later.
FIELDS = {"replicas", "startupPolicy", "networkConfig", "leaderWorkerTemplate"}
TEMPLATE_FIELDS = {
    "size",
    "restartPolicy",
    "persistentVolumeClaimRetentionPolicy",
    "volumeClaimTemplates",
    "leaderTemplate",
    "workerTemplate",
}


def render_divided(values: str = "values-demo.yaml", *options: str) -> list[Object]:
    """The objects of a chart whose workers are on two machines each."""
    return render(values, DIVIDED, *options, apis=(*APIS, API))


def get_templates(objects: list[Object]) -> list[Object]:
    """The pods of the first and the second machine of a worker."""
    template = get_one(objects, "LeaderWorkerSet", "worker")["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def get_command(objects: list[Object], index: int) -> tuple[list[str], dict[str, str]]:
    """The command line of a machine's container, and its environment."""
    (container,) = get_templates(objects)[index]["spec"]["containers"]
    environment = get_texts(objects, container) | LAUNCHER | {"LWS_WORKER_INDEX": str(index)}
    words = [expand(text, environment) for text in container["command"] + container["args"]]
    return words, environment


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_schemas_accept_the_pods_of_both_machines(version: str, tmp_path: Path) -> None:
    objects = render_divided("values-production.yaml", "worker.gpu.count=1")
    spec = get_one(objects, "LeaderWorkerSet", "worker")["spec"]
    assert spec.keys() <= FIELDS
    assert spec["leaderWorkerTemplate"].keys() <= TEMPLATE_FIELDS
    pods = []
    for number, template in enumerate(get_templates(objects)):
        pod = copy.deepcopy(template)
        # Of the claim that the set makes for it.
        pod["spec"]["volumes"].append({"name": "data", "emptyDir": {}})
        pods.append({"apiVersion": "v1", "kind": "Pod", **pod})
        pods[-1]["metadata"]["name"] = f"machine-{number}"
    found = validate(pods, version, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_worker_of_several_machines_is_no_stateful_set_and_is_scaled_as_one() -> None:
    objects = render_divided("values-production.yaml", "worker.gpu.count=1")
    assert not [
        each for each in select(objects, "StatefulSet") if "worker" in str(each["metadata"])
    ]
    workers = get_one(objects, "LeaderWorkerSet", "worker")
    (scaled,) = select(objects, "ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": API,
        "kind": workers["kind"],
        "name": workers["metadata"]["name"],
    }
    assert "replicas" not in workers["spec"]


def test_the_machines_of_a_worker_start_torchs_launcher_and_kvrecall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for index in range(2):
        words, environment = get_command(render_divided(), index)
        assert words[:3] == ["python3", "-m", "torch.distributed.run"]
        launch = get_args_parser().parse_args(words[3:])
        assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("2", index, "1")
        assert (launch.module, launch.training_script) == (True, "kvrecall_server.cli")
        parse(launch.training_script_args)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert Settings().tensor_parallel == int(launch.nnodes) * int(launch.nproc_per_node)
        others = environment.keys() - OTHER_NAMES - LAUNCHER.keys()
        assert {each for each in others if not each.startswith("KVRECALL_")} == {
            "LWS_WORKER_INDEX",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        }
        grace = get_templates(render_divided())[index]["spec"]["terminationGracePeriodSeconds"]
        assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace


def test_the_machines_of_a_worker_talk_to_each_other_and_the_first_to_gateways_alone() -> None:
    objects = render_divided()
    first, second = (Peer(each["metadata"]["labels"]) for each in get_templates(objects))
    gateway = Peer(
        get_one(objects, "Deployment", "gateway")["spec"]["template"]["metadata"]["labels"]
    )
    redis = Peer(get_one(objects, "StatefulSet", "redis")["spec"]["template"]["metadata"]["labels"])
    for port in (29500, 41234):
        assert connects(objects, second, first, port)
        assert connects(objects, first, second, port)
        assert not connects(objects, STRANGER, second, port)
        assert not connects(objects, gateway, second, port)
    assert connects(objects, gateway, first, 8421)
    assert not connects(objects, gateway, second, 8421)
    assert connects(objects, second, redis, 6379)
    assert allows(objects, second, "out", Peer({}, "kube-system"), 53)
    (service,) = [
        each for each in select(objects, "Service") if each["metadata"]["name"].endswith("-worker")
    ]
    selector = service["spec"]["selector"].items()
    assert selector <= first.labels.items()
    assert not selector <= second.labels.items()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ('{"size": 3, "machines": 2}', "is no multiple of worker.tensorParallel.machines 2"),
        ('{"size": 4, "machines": 2}', "needs as many GPUs"),
    ],
)
def test_divisions_that_would_not_work_are_refused(option: str, words: str) -> None:
    options = (f"worker.tensorParallel={option}", "worker.gpu.count=1")
    assert words in get_message("values.yaml", *options, apis=(*APIS, API))


def test_a_cluster_without_leader_worker_sets_is_refused() -> None:
    found = run_template("values.yaml", DIVIDED)
    assert found.returncode != 0
    assert "install LeaderWorkerSet" in found.stderr
