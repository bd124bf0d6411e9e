"""Fixtures: a Docker daemon, the images, and the compose file's services, started once and taken down at the end.

Of a chart the same images run, see `cluster.py`.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from _pytest.capture import CaptureManager

from kvrecall.client import KvrecallClient
from tests.compose.daemon import NoDocker, find_daemon
from tests.compose.docker import Docker, DockerFailed
from tests.compose.images import Images, get_images
from tests.compose.stack import PROFILES, Stack
from tests.compose.stand_ins import CannotMakeImages
from tests.operations.charts import get_one, get_pod, render
from tests.operations.compose import read_compose
from tests.operations.prometheus import PrometheusApi

# Beside the compose file's services, of the chart's Redis.
EXPORTER = "redis-exporter"
VARIABLES = {"KVRECALL_API_KEY": "of the tests", "KVRECALL_WORKER_TOKEN": "of the tests"}


class Progress:
    """A line for every step before the tests, with its seconds: some take minutes."""

    def __init__(self, config: pytest.Config) -> None:
        self._terminal = config.get_terminal_writer()
        self._capture: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Measure a step."""
        begin = time.monotonic()
        yield
        shown = self._capture.global_and_fixture_disabled() if self._capture else nullcontext()
        with shown:
            self._terminal.line(f"{what}: {time.monotonic() - begin:.0f} s", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the containers' logs with a failed test."""
    report = yield
    started = getattr(item, "funcargs", {})
    for name in {"stack", "release"} & started.keys():
        if report.failed:
            report.sections.append(("Containers", started[name].logs()))
    return report


@pytest.fixture(scope="session")
def progress(pytestconfig: pytest.Config) -> Progress:
    return Progress(pytestconfig)


@pytest.fixture(scope="session")
def docker(progress: Progress) -> Iterator[Docker]:
    """A daemon; without one the tests end with what is missing."""
    try:
        with find_daemon() as docker:
            yield docker
    except NoDocker as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def images(docker: Docker, progress: Progress) -> Images:
    """Images of the services and of the chart's pods that the tests start."""
    compose = read_compose(VARIABLES)
    services = {
        name: service
        for name, service in compose["services"].items()
        if set(service.get("profiles", PROFILES)) <= set(PROFILES)
    }
    redis = get_pod(get_one(render("values-demo.yaml"), "StatefulSet", "redis"))
    services[EXPORTER] = {"image": redis["containers"][1]["image"]}
    try:
        with progress.step("images pulled or made"):
            return get_images(docker, {"services": services})
    except CannotMakeImages as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def project(
    docker: Docker,
    images: Images,
    progress: Progress,
    tmp_path_factory: pytest.TempPathFactory,
) -> Stack:
    """The compose file's project with its images. Nothing runs, of a run that was killed neither."""
    stack = Stack(docker, images, tmp_path_factory.mktemp("compose"))
    stack.prepare()
    stack.down()
    with progress.step("images of kvrecall built"):
        stack.build()
    return stack


@pytest.fixture(scope="session")
def stack(project: Stack, progress: Progress) -> Iterator[Stack]:
    """The services, healthy. Nothing of them is left afterwards."""
    try:
        with progress.step("services healthy"):
            _start(project)
        yield project
    finally:
        project.down()
    assert project.remains() == []


def _start(stack: Stack) -> None:
    try:
        stack.up()
    except DockerFailed:
        print(stack.logs())
        raise


@pytest.fixture
def client(stack: Stack) -> Iterator[KvrecallClient]:
    with stack.connect() as client:
        yield client


@pytest.fixture(scope="session")
def prometheus(stack: Stack) -> Iterator[PrometheusApi]:
    api = PrometheusApi(stack.url("prometheus"))
    with api.http:
        yield api
