"""The chart's pods have no right, no secret and no caller more than they need."""

import ipaddress
from typing import Any

import pytest
import yaml

from tests.operations.charts import (
    NAMESPACE,
    VALUES,
    Object,
    expand,
    get_component,
    get_containers,
    get_environment,
    get_one,
    get_pod,
    get_pod_labels,
    get_workloads,
    render,
    select,
)

EVERY = pytest.mark.parametrize("values", VALUES)
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@EVERY
def test_secrets_are_in_no_command_line_and_in_no_configmap(values: str) -> None:
    values_of_secrets = (
        'access={"existingSecret": "", "apiKey": "planted-api-key", "pepper": "planted-pepper-01234"}',
        'workerToken={"existingSecret": "", "value": "planted-worker-token"}',
    )
    objects = render(values, *values_of_secrets)
    shown = [each for each in objects if each["kind"] != "Secret"]
    assert "planted" not in yaml.safe_dump_all(shown)
    assert "demonstration" not in yaml.safe_dump_all(shown)
    (secret,) = select(objects, "Secret")
    assert {"api-key", "pepper", "worker-token"} <= set(secret["data"])


@EVERY
def test_no_container_has_more_rights_than_it_needs(values: str) -> None:
    for workload in get_workloads(render(values)):
        pod = get_pod(workload)
        assert pod["automountServiceAccountToken"] is False
        # A Service called kvrecall would set KVRECALL_PORT, a setting, to tcp://...
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in get_containers(workload):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert {"requests", "limits"} <= container["resources"].keys()
            if container["name"] == "own-data":
                assert values == "values-production.yaml", "only for hostPath"
                assert context["capabilities"]["add"] == ["CHOWN"]
            else:
                assert context["runAsNonRoot"] is True
                assert "add" not in context["capabilities"]


def test_certificates_are_for_the_names_that_workers_advertise() -> None:
    objects = render("values-production.yaml")
    (container,) = get_pod(get_one(objects, "StatefulSet", "worker"))["containers"]
    environment = get_environment(objects, container)
    (advertised,) = [
        expand(text, environment).removeprefix("--advertise=").rpartition(":")[0]
        for text in container["args"]
        if text.startswith("--advertise=")
    ]
    names = get_one(objects, "Certificate", "worker")["spec"]["dnsNames"]
    assert f"*.{advertised.partition('.')[2]}" in names
    for component, usage in (("gateway", "client auth"), ("worker", "server auth")):
        assert usage in get_one(objects, "Certificate", component)["spec"]["usages"]


@EVERY
def test_the_keys_of_the_charts_own_secret_are_those_that_pods_ask_for(values: str) -> None:
    objects = render(values)
    keys = {each["metadata"]["name"]: set(each["data"]) for each in select(objects, "Secret")}
    asked: dict[str, set[str]] = {}
    for workload in get_workloads(objects):
        for container in get_containers(workload):
            for variable in container.get("env") or ():
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and reference["name"] in keys:
                    asked.setdefault(reference["name"], set()).add(reference["key"])
    assert asked == keys


class Peer:
    """One end of a connection: a pod with its labels in a namespace, or an address outside."""

    def __init__(
        self, labels: Any = None, namespace: str = NAMESPACE, address: str | None = None
    ) -> None:
        self.labels = labels or {}
        self.namespace = namespace
        self.address = address

    def matches(self, peer: Object) -> bool:
        """Evaluate a NetworkPolicyPeer of a policy in the release's namespace."""
        if "ipBlock" in peer:
            block = ipaddress.ip_network(peer["ipBlock"]["cidr"])
            return self.address is not None and ipaddress.ip_address(self.address) in block
        if self.address is not None:
            return False
        if "namespaceSelector" in peer:
            wanted = peer["namespaceSelector"].get("matchLabels", {})
            if not wanted.items() <= {NAMESPACE_LABEL: self.namespace}.items():
                return False
        elif self.namespace != NAMESPACE:
            return False
        wanted = peer.get("podSelector", {}).get("matchLabels", {})
        return bool(wanted.items() <= self.labels.items())


def allows(objects: list[Object], pod: Peer, direction: str, other: Peer, port: int) -> bool:
    """Whether the policies let a pod of the release have a TCP connection from or to another."""
    kind, member = {"in": ("Ingress", "from"), "out": ("Egress", "to")}[direction]
    policies = [
        each["spec"]
        for each in select(objects, "NetworkPolicy")
        if pod.namespace == NAMESPACE
        and pod.address is None
        and each["spec"]["podSelector"]["matchLabels"].items() <= pod.labels.items()
        and kind in each["spec"]["policyTypes"]
    ]
    rules = [rule for spec in policies for rule in spec.get(kind.lower()) or ()]
    return not policies or any(
        (member not in rule or any(other.matches(peer) for peer in rule[member]))
        and (
            "ports" not in rule
            or any(
                each.get("port") == port and each.get("protocol", "TCP") == "TCP"
                for each in rule["ports"]
            )
        )
        for rule in rules
    )


def connects(objects: list[Object], caller: Peer, called: Peer, port: int) -> bool:
    """Whether both ends' policies let a connection through."""
    leaves = allows(objects, caller, "out", called, port)
    return leaves and allows(objects, called, "in", caller, port)


def get_peers(objects: list[Object]) -> dict[str, Peer]:
    """The pods of the release by component."""
    return {get_component(each): Peer(get_pod_labels(each)) for each in get_workloads(objects)}


def get_port(objects: list[Object], component: str, name: str) -> int:
    """The port of a component's container that its Service sends to."""
    for workload in get_workloads(objects):
        for container in get_containers(workload):
            for port in container.get("ports", ()):
                if (get_component(workload), port["name"]) == (component, name):
                    number: int = port["containerPort"]
                    return number
    raise AssertionError(f"{component} has no port {name}")


OPERATOR = Peer({"app": "prometheus"}, "monitoring")
INGRESS = Peer({"app": "nginx"}, "ingress-nginx")
STRANGER = Peer({"app": "stranger"}, "elsewhere")
NEIGHBOUR = Peer({"app": "application"})


@EVERY
def test_the_network_lets_every_caller_in_and_nobody_else(values: str) -> None:
    objects = render(values, "gateway.grpc.enabled=true")
    pods = get_peers(objects)
    gateway, worker = pods["gateway"], pods["worker"]
    http = get_port(objects, "gateway", "http")
    for port in (http, get_port(objects, "gateway", "grpc")):
        assert connects(objects, NEIGHBOUR, gateway, port)
        assert connects(objects, INGRESS, gateway, port)
        assert not connects(objects, STRANGER, gateway, port)
    assert connects(objects, OPERATOR, gateway, http)
    calls = get_port(objects, "worker", "grpc")
    assert connects(objects, gateway, worker, calls)
    for other in (worker, NEIGHBOUR, INGRESS, OPERATOR, STRANGER):
        assert not connects(objects, other, worker, calls)
    scrapes = get_port(objects, "worker", "ops")
    assert connects(objects, OPERATOR, worker, scrapes)
    for other in (gateway, NEIGHBOUR, STRANGER):
        assert not connects(objects, other, worker, scrapes)


@EVERY
def test_both_components_reach_redis_and_names_and_little_else(values: str) -> None:
    objects = render(values)
    pods = get_peers(objects)
    outside = Peer(address="203.0.113.7")
    for component in ("gateway", "worker"):
        pod = pods[component]
        assert allows(objects, pod, "out", Peer({}, "kube-system"), 53)
        if "redis" in pods:
            port = get_port(objects, "redis", "redis")
            assert connects(objects, pod, pods["redis"], port)
            assert not connects(objects, pod, outside, port)
        elif values != "values-minimal.yaml":
            assert allows(objects, pod, "out", Peer(address="10.1.2.3"), 6379)
            near_only = values == "values-production.yaml"
            assert allows(objects, pod, "out", outside, 6379) is not near_only
        is_traced = values == "values-production.yaml"
        assert allows(objects, pod, "out", Peer({}, "monitoring"), 4318) is is_traced
    downloads = values == "values-production.yaml"
    assert allows(objects, pods["worker"], "out", outside, 443) is downloads
    assert not allows(objects, pods["gateway"], "out", outside, 443)
    if "redis" in pods:
        assert connects(objects, OPERATOR, pods["redis"], get_port(objects, "redis", "metrics"))
        for other in (NEIGHBOUR, OPERATOR, STRANGER):
            assert not connects(objects, other, pods["redis"], get_port(objects, "redis", "redis"))


def test_the_policies_can_be_left_out_and_their_peers_chosen() -> None:
    assert not select(render("values.yaml", "networkPolicy.enabled=false"), "NetworkPolicy")
    objects = render("values.yaml", "networkPolicy.clients=[]", "networkPolicy.monitoring=[]")
    pods = get_peers(objects)
    assert not connects(objects, NEIGHBOUR, pods["gateway"], 8420)
    assert not connects(objects, OPERATOR, pods["worker"], 9421)
    assert connects(objects, pods["gateway"], pods["worker"], 8421)
