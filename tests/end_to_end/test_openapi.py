"""Fuzzing by the OpenAPI description, against a real server with a real worker."""

import importlib.util
from pathlib import Path
from types import ModuleType


def _load_gateway_fuzz() -> ModuleType:
    """Load the fuzz of the gateway's tests by path; test folders are no packages."""
    path = Path(__file__).parents[1] / "gateway" / "test_openapi.py"
    spec = importlib.util.spec_from_file_location("gateway_test_openapi", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fuzz = _load_gateway_fuzz()
description = _fuzz.description
test_every_response_conforms = _fuzz.test_every_response_conforms
test_an_existing_session_survives_every_write = _fuzz.test_an_existing_session_survives_every_write


def test_the_server_is_ready_after_the_fuzz(client) -> None:
    assert client.ready()
    assert client.turn(client.create_session(), "Hello.").turn == 1
