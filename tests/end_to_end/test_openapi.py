"""The fuzz of the front door once more, now against a real server with a real worker behind it."""

import importlib.util
from pathlib import Path


def _of_the_gateway():
    """The front door's own fuzz: test folders are no packages, so it is loaded by path."""
    path = Path(__file__).parents[1] / "gateway" / "test_openapi.py"
    spec = importlib.util.spec_from_file_location("gateway_test_openapi", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fuzz = _of_the_gateway()
description = _fuzz.description
test_every_response_conforms = _fuzz.test_every_response_conforms
test_an_existing_session_survives_every_write = _fuzz.test_an_existing_session_survives_every_write


def test_the_server_is_ready_after_all_that(client) -> None:
    assert client.ready()
    assert (
        client.turn(client.create_session()["id"], [{"role": "user", "content": "Hello."}])["turn"]
        == 1
    )
