"""The images of the compose file: a registry's, or stand-ins where it cannot be reached."""

from dataclasses import dataclass, field

from tests.compose.docker import Docker
from tests.compose.stand_ins import StandIns
from tests.operations.compose import Json

BUILT = "kvrecall-compose-test"


@dataclass
class Images:
    """What an override changes in the compose file's services, and the services that have no image here."""

    services: dict[str, Json] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


def get_images(docker: Docker, compose: Json) -> Images:
    """Pull what is not there, or make stand-ins. Images that compose builds get names of the tests' own."""
    images = Images()
    built = {name for name, service in compose["services"].items() if "build" in service}
    pulled = {name: service["image"] for name, service in compose["services"].items()}
    is_reachable = all(_pull(docker, pulled[name]) for name in pulled.keys() - built)
    for name in built:
        images.services[name] = {"image": f"{BUILT}/{name}"}
    if not is_reachable:
        stand_ins = StandIns(docker)
        # The containers of a build reach what this machine does.
        build = {"args": {"PYTHON_IMAGE": stand_ins.make_python()}, "network": "host"}
        for name in built:
            images.services[name]["build"] = build
        for name in pulled.keys() - built:
            _stand_in(stand_ins, images, name, pulled[name])
    return images


def _stand_in(stand_ins: StandIns, images: Images, name: str, pulled: str) -> None:
    """Give a service without an image a stand-in, if there is one."""
    if stand_ins.docker.has_image(pulled):
        return
    stand_in = stand_ins.make_service(name)
    if stand_in is None:
        images.absent.add(name)
    else:
        images.services[name] = {"image": stand_in}


def _pull(docker: Docker, image: str) -> bool:
    return docker.has_image(image) or docker.succeeds("pull", "--quiet", image)
