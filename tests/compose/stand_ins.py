"""Images that stand in for those of a registry, where none can be reached: Debian's packages in containers.

The base of our own images is Debian with its Python, and the wheels that the Dockerfile installs: a build
then needs apt's mirror alone. Mirrors and indexes are those that apt and pip of this machine are set to.
Programs are called as in the images that they stand in for. No registry's name is used as a tag, so that
a stand-in is not taken for the image itself. Each is made once for a state of what it depends on.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.compose.docker import Docker
from tests.operations.catalogue import ROOT

PREFIX = "kvrecall-stand-in"
SUITE = "bookworm"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
SERVICE_PACKAGES = (
    "redis-server",
    "prometheus",
    "prometheus-alertmanager",
    "prometheus-redis-exporter",
    "wget",
)
# Also what builds our own packages; the extras of all images that compose builds.
EXTRAS = ("gateway", "otel", "s3", "worker", "torch")
BUILD_TOOLS = ("setuptools>=77", "wheel", "pip")
# Users and folders as in the images of Redis and Prometheus, and Redis without the protected mode that it
# is built without in its image: clients in other containers reach it without a password.
_INSTALL_SERVICES = f"""
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends {" ".join(SERVICE_PACKAGES)}
rm -rf /var/lib/apt/lists/*
install --directory --owner 999 --group 999 /data
install --directory --owner nobody --group nogroup /prometheus /alertmanager
ln -s /usr/bin/prometheus-alertmanager /usr/bin/alertmanager
printf '#!/bin/sh\\nexec /usr/bin/redis-server "$@" --protected-mode no\\n' > /usr/local/bin/redis-server
chmod 755 /usr/local/bin/redis-server
"""
# From /wheels alone from now on, whatever index an image's build names.
_COLLECT_WHEELS = """
python3 -m venv /tmp/venv
export PIP_CONFIG_FILE=/machine/pip.conf
/tmp/venv/bin/pip wheel --quiet -c /machine/constraints.txt -r /machine/requirements.txt --wheel-dir /wheels
rm -rf /tmp/venv
printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
"""
_SERVICES = {
    "redis": ("WORKDIR /data", "USER 999:999", 'CMD ["redis-server"]'),
    "prometheus": ("WORKDIR /prometheus", "USER nobody", 'ENTRYPOINT ["prometheus"]'),
    "alertmanager": ("WORKDIR /alertmanager", "USER nobody", 'ENTRYPOINT ["alertmanager"]'),
    "redis-exporter": ("USER 59000:59000", 'ENTRYPOINT ["prometheus-redis-exporter"]'),
}


class CannotMakeImages(RuntimeError):
    """Something that the images are made with is missing; the message says what."""


@dataclass(frozen=True)
class StandIns:
    """Makes the images on a daemon."""

    docker: Docker

    def make_service(self, name: str) -> str | None:
        """Return the image of a service, None if no package of Debian has its program."""
        if name not in _SERVICES:
            return None
        image = _tag_service(name)
        if not self.docker.has_image(image):
            self._commit_services()
        return image

    def make_python(self) -> str:
        """Return the image for PYTHON_IMAGE of the Dockerfile."""
        requirements = _read_requirements()
        constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        image = _tag("python", _COLLECT_WHEELS, requirements, constraints)
        if not self.docker.has_image(image):
            settings, folders = _read_pip_settings()
            with tempfile.TemporaryDirectory() as machine:
                (Path(machine) / "requirements.txt").write_text(requirements, encoding="utf-8")
                (Path(machine) / "constraints.txt").write_text(constraints, encoding="utf-8")
                (Path(machine) / "pip.conf").write_text(settings, encoding="utf-8")
                mounts = [f"{machine}:/machine", *(f"{folder}:{folder}" for folder in folders)]
                options = [f"--volume={mount}:ro" for mount in mounts]
                self._commit(_COLLECT_WHEELS, {image: ()}, *options)
        return image

    def _commit_services(self) -> None:
        images = {_tag_service(name): changes for name, changes in _SERVICES.items()}
        self._commit(_INSTALL_SERVICES, images)

    def _commit(self, script: str, images: Mapping[str, Sequence[str]], *options: str) -> None:
        """Run a script in the base, with this machine's network; name what it leaves."""
        container = self.docker(
            *("container", "create", "--network=host", *options),
            *(self._make_base(), "sh", "-euc", script),
        ).strip()
        try:
            self.docker("start", "--attach", container)
            for image, changes in images.items():
                # The command of the container itself, the script, is not the image's.
                change = [part for each in ("CMD []", *changes) for part in ("--change", each)]
                self.docker("commit", *change, container, image)
        finally:
            self.docker("rm", "--force", "--volumes", container)

    def _make_base(self) -> str:
        image = _tag("debian", SUITE, BASE_PACKAGES)
        if self.docker.has_image(image):
            return image
        if shutil.which("mmdebstrap") is None:
            raise CannotMakeImages(
                "no registry can be reached, and to make images without one mmdebstrap is missing: "
                "install Debian's package mmdebstrap"
            )
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/base.tar"
            command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}"]
            self.docker.run(*command, SUITE, archive, *_find_mirror())
            self.docker("import", archive, image)
        return image


def _tag(name: str, *states: str) -> str:
    """Name of an image that was made of `states`."""
    return f"{PREFIX}/{name}:{hashlib.sha256(''.join(states).encode()).hexdigest()[:12]}"


def _tag_service(name: str) -> str:
    return _tag(name, SUITE, _INSTALL_SERVICES, *_SERVICES[name])


def _find_mirror() -> list[str]:
    """The mirror that apt takes Debian's packages from; none: that of mmdebstrap."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)"]
    which = ["Created-By: Packages", "Component: main", f"Codename: {SUITE}"]
    done = subprocess.run([*command, *which], capture_output=True, text=True)
    return done.stdout.split()[:1]


def _read_requirements() -> str:
    script = [sys.executable, "deploy/requirements.py", *EXTRAS]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    return "\n".join((*done.stdout.splitlines(), *BUILD_TOOLS)) + "\n"


def _read_pip_settings() -> tuple[str, list[str]]:
    """What pip is set to here, as a file of settings, and the folders and files that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    named = {"/etc/ssl/certs"}
    for line in listed.splitlines():
        name, _, quoted = line.partition("=")
        value = quoted.strip("'")
        # A variable of the environment, which is listed first, counts more than a file.
        settings.setdefault(name.rpartition(".")[2].strip("'"), value)
        for scheme, path in re.findall(r"(?:^|\s)(file://)?(/\S+)", value):
            # An index has its files beside its pages.
            parent = Path(path).parent
            named.add(str(parent) if scheme and parent != Path("/") else path)
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items()), ""]
    return "\n".join(lines), sorted(path for path in named if Path(path).exists())
