"""Certificates: the rules are the same for every server, and for a channel."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.grpc.settings import GrpcSettings
from kvrecall.protocol.certificates import CannotBind, bind, read_channel
from services.cluster.settings import WireSettings
from workers.rpc.settings import ServerSettings

HALVES = [{"tls_cert": Path("a")}, {"tls_key": Path("a")}]
SERVERS = pytest.mark.parametrize("settings", [GrpcSettings, ServerSettings])


@SERVERS
@pytest.mark.parametrize("wrong", [*HALVES, {"tls_client_ca": Path("a")}])
def test_a_server_needs_what_belongs_to_a_certificate(settings: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="tls_cert and tls_key"):
        settings(**wrong)
    pair = {"tls_cert": Path("a"), "tls_key": Path("b")}
    assert settings(**pair, tls_client_ca=Path("c")).tls_key == Path("b")


@pytest.mark.parametrize("wrong", [*HALVES, {"tls_cert": Path("a"), "tls_key": Path("a")}])
def test_a_channel_shows_a_certificate_only_where_it_checks_the_servers(wrong: Any) -> None:
    with pytest.raises(ValueError, match="tls_cert and tls_key"):
        WireSettings(**wrong)


@SERVERS
async def test_files_that_are_no_certificates_are_refused_when_an_address_is_bound(
    settings: Any, tmp_path: Path
) -> None:
    server = grpc.aio.server()
    assert bind(server, "127.0.0.1:0", settings()) > 0
    pair = {"tls_cert": tmp_path / "a", "tls_key": tmp_path / "b"}
    with pytest.raises(CannotBind, match="cannot be read"):
        bind(server, "127.0.0.1:0", settings(**pair))
    for path in pair.values():
        path.write_text("no certificate")
    with pytest.raises(CannotBind, match="does not fit its key"):
        bind(server, "127.0.0.1:0", settings(**pair))


def test_a_channel_has_credentials_only_with_a_ca(tmp_path: Path) -> None:
    assert read_channel(WireSettings()) is None
    with pytest.raises(OSError, match="ca"):
        read_channel(WireSettings(tls_ca=tmp_path / "ca"))
