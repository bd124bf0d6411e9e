"""A cluster's part on a Docker daemon: names of pods, volumes and their owners, files of ConfigMaps and Secrets.

What the kubelet does is done by Docker: a pod is containers with one network, whose users, rights, limits,
files, environment and probes are the chart's.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.compose.docker import Docker
from tests.compose.pod import Pod, get_ports
from tests.operations.charts import Object, expand, get_texts

LABEL = "kvrecall-chart-test"
NETWORK = LABEL
# Modes of a volume's folder and of its files, as the kubelet makes them.
EMPTY, CLAIMED, OF_THE_NODE = 0o2777, 0o2775, 0o755
FILES = 0o644
_FILL = """
import base64, json, os
volume = json.loads(os.environ["VOLUME"])
for name, text in volume["files"].items():
    with open(f"/volume/{name}", "wb") as file:
        file.write(base64.b64decode(text))
    os.chown(file.name, 0, volume["group"])
    os.chmod(file.name, volume["file_mode"])
os.chown("/volume", 0, volume["group"])
os.chmod("/volume", volume["mode"])
"""


@dataclass(frozen=True)
class Volume:
    """What a volume has when a pod starts.

    Attributes:
        name: Docker's name of it.
        mode: Of its folder.
        group: Of its folder and files, whose owner is root.
        files: Contents by name, in Base64.
        file_mode: Of its files.
    """

    name: str
    mode: int
    group: int
    files: Mapping[str, str] = field(default_factory=dict)
    file_mode: int = FILES


@dataclass(frozen=True)
class Cluster:
    """Where pods of a release run.

    Attributes:
        docker: The daemon.
        objects: What the chart renders, and further Secrets.
        images: Images by names of containers, where they are others than the chart's.
    """

    docker: Docker
    objects: list[Object]
    images: Mapping[str, str]

    def prepare(self) -> None:
        """Make the network. Nothing is left of a run that was killed."""
        self.remove()
        self.docker("network", "create", f"--label={LABEL}", NETWORK)

    def remove(self) -> None:
        """Remove containers, volumes and the network."""
        chosen = ("--quiet", "--filter", f"label={LABEL}")
        if containers := self.docker("ps", "--all", *chosen).split():
            self.docker("rm", "--force", "--volumes", *containers)
        if volumes := self.docker("volume", "ls", *chosen).split():
            self.docker("volume", "rm", *volumes)
        if networks := self.docker("network", "ls", *chosen).split():
            self.docker("network", "rm", *networks)

    def start(self, name: str, spec: Object, hosts: Sequence[str] = (), **environment: str) -> Pod:
        """Start a pod under its name, which the others find under `hosts` too; `environment`: more variables.

        A second start finds all volumes but an emptyDir as the first one left them.
        """
        volumes = {each.name: each for each in self._get_volumes(name, spec)}
        for volume in volumes.values():
            self._make(volume)
        for container in spec.get("initContainers", ()):
            self._run(name, spec, container, environment, "--rm")
        first, *others = spec["containers"]
        aliases = [f"--network-alias={host}" for host in (name, *hosts)]
        ports = [f"--publish=127.0.0.1::{port['containerPort']}" for port in get_ports(spec)]
        options = ("--detach", f"--network={NETWORK}", f"--hostname={name}", *aliases, *ports)
        ids = {first["name"]: self._run(name, spec, first, environment, *options)}
        shared = f"--network=container:{ids[first['name']]}"
        for container in others:
            options = ("--detach", shared)
            ids[container["name"]] = self._run(name, spec, container, environment, *options)
        return Pod(self.docker, name, spec, ids)

    def _get_volumes(self, name: str, spec: Object) -> list[Volume]:
        group = spec["securityContext"]["fsGroup"]
        mounted = {
            mount["name"]
            for container in [*spec.get("initContainers", ()), *spec["containers"]]
            for mount in container.get("volumeMounts", ())
        }
        named = {volume["name"]: volume for volume in spec.get("volumes", ())}
        return [
            # A claim's template gives a volume that the pod's spec does not name.
            self._read_volume(
                f"{name}-{each}", named.get(each, {"persistentVolumeClaim": {}}), group
            )
            for each in sorted(mounted)
        ]

    def _read_volume(self, name: str, volume: Object, group: int) -> Volume:
        if "emptyDir" in volume:
            return Volume(name, EMPTY, group)
        if "persistentVolumeClaim" in volume:
            return Volume(name, CLAIMED, group)
        if "hostPath" in volume:
            # The kubelet gives a group to volumes, and to no folder of the node.
            return Volume(name, OF_THE_NODE, 0)
        if "secret" in volume:
            source = volume["secret"]
            files = self._get_data("Secret", source["secretName"])
        else:
            source = volume["configMap"]
            texts = self._get_data("ConfigMap", source["name"])
            files = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        return Volume(name, OF_THE_NODE, group, files, source.get("defaultMode", FILES))

    def _get_data(self, kind: str, name: str) -> dict[str, str]:
        (found,) = [
            each
            for each in self.objects
            if (each["kind"], each["metadata"]["name"]) == (kind, name)
        ]
        data: dict[str, str] = found["data"]
        return data

    def _make(self, volume: Volume) -> None:
        """Make a volume, unless an earlier pod of this name has left it. An emptyDir ends with its pod."""
        if volume.mode == EMPTY:
            self.docker("volume", "rm", "--force", volume.name)
        if self.docker.succeeds("volume", "inspect", volume.name):
            return
        self.docker("volume", "create", f"--label={LABEL}", volume.name)
        content = {
            "mode": volume.mode,
            "group": volume.group,
            "files": volume.files,
            "file_mode": volume.file_mode,
        }
        self.docker(
            *("run", "--rm", "--user=0", f"--env=VOLUME={json.dumps(content)}"),
            *(_mount(volume.name, "/volume"), "--entrypoint=python3"),
            *(self.images["gateway"], "-c", _FILL),
        )

    def _run(
        self,
        name: str,
        spec: Object,
        container: Object,
        environment: Mapping[str, str],
        *options: str,
    ) -> str:
        """Run a container of a pod; returns what `docker run` writes."""
        texts = {**get_texts(self.objects, container), **environment}
        words = [expand(each, texts) for each in container.get("command", ())]
        arguments = [expand(each, texts) for each in container.get("args", ())]
        entry = [f"--entrypoint={words[0]}"] if words else []
        mounts = [
            _mount(f"{name}-{each['name']}", each["mountPath"], each.get("readOnly", False))
            for each in container.get("volumeMounts", ())
        ]
        return self.docker(
            *("run", f"--label={LABEL}", f"--name={name}-{container['name']}", *options),
            *get_rights(spec, container),
            *(f"--env={key}={value}" for key, value in texts.items()),
            *(*mounts, *entry),
            self.images.get(container["name"], container["image"]),
            *(*words[1:], *arguments),
        ).strip()


def get_rights(spec: Object, container: Object) -> list[str]:
    """Docker's options for a container's security context and its limit of memory."""
    context: dict[str, Any] = spec["securityContext"] | container["securityContext"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}, "which is Docker's as well"
    user = context["runAsUser"]
    assert user > 0 or not context["runAsNonRoot"], "the kubelet would not start it"
    memory = container["resources"]["limits"]["memory"]
    rights = [f"--user={user}:{context['runAsGroup']}", f"--group-add={context['fsGroup']}"]
    rights.append(f"--memory={memory.removesuffix('i').lower()}")
    if context["readOnlyRootFilesystem"]:
        rights.append("--read-only")
    if not context["allowPrivilegeEscalation"]:
        rights.append("--security-opt=no-new-privileges")
    rights += [f"--cap-drop={each}" for each in context["capabilities"].get("drop", ())]
    rights += [f"--cap-add={each}" for each in context["capabilities"].get("add", ())]
    return rights


def _mount(volume: str, path: str, read_only: bool = False) -> str:
    """Option for a volume, whose owner and mode are its own and not those of the image's folder."""
    return (
        f"--mount=type=volume,source={volume},target={path},volume-nocopy{',readonly' * read_only}"
    )
