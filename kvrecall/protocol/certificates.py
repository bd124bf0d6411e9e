"""Certificates of gRPC servers and of channels: which belong together, and how they are read.

The one place for a worker's server, the public one of a gateway, and a gateway's way to its workers.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import grpc


_LAST_PORT = 65_535


class ServerCertificates(Protocol):
    """Settings of a server: its chain with the key, and the CA that clients must be signed by."""

    @property
    def tls_cert(self) -> Path | None:
        """The server's certificate chain, PEM; None: no TLS."""
        ...

    @property
    def tls_key(self) -> Path | None:
        """Its private key, PEM."""
        ...

    @property
    def tls_client_ca(self) -> Path | None:
        """CA certificates, PEM; None: any client."""
        ...


class ChannelCertificates(Protocol):
    """Settings of a channel: the CA that the server must be signed by, and the client's own."""

    @property
    def tls_ca(self) -> Path | None:
        """CA certificates, PEM; None: no TLS."""
        ...

    @property
    def tls_cert(self) -> Path | None:
        """The client's certificate chain, PEM; None: it shows none."""
        ...

    @property
    def tls_key(self) -> Path | None:
        """Its private key, PEM."""
        ...


class CannotBind(Exception):
    """An address is in use or none, or a certificate cannot be read or does not fit its key."""


def check_server(settings: ServerCertificates) -> None:
    """Raise ValueError for a certificate of a server without what belongs to it."""
    _check_pair(settings.tls_cert, settings.tls_key)
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise ValueError("tls_client_ca needs tls_cert and tls_key")


def check_channel(settings: ChannelCertificates) -> None:
    """Raise ValueError for a certificate of a client without what belongs to it."""
    _check_pair(settings.tls_cert, settings.tls_key)
    if settings.tls_cert is not None and settings.tls_ca is None:
        raise ValueError("tls_cert and tls_key need tls_ca")


def bind(server: "grpc.aio.Server", listen: str, settings: ServerCertificates) -> int:
    """Bind a server to HOST:PORT, with TLS if it has a certificate; return its port.

    Raises CannotBind.
    """
    port = listen.rpartition(":")[2]
    if not port.isdecimal() or int(port) > _LAST_PORT:  # gRPC takes the last 16 bits of a number
        raise CannotBind(
            f"cannot listen on {listen}: expected HOST:PORT, a port up to {_LAST_PORT}"
        )
    try:
        credentials = _read_server(settings)
        if credentials is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, credentials)
    except OSError as error:
        raise CannotBind(f"a certificate cannot be read: {error}") from error
    except RuntimeError as error:
        raise CannotBind(
            f"cannot listen on {listen} for gRPC: it is in use or no HOST:PORT, or the certificate "
            "does not fit its key"
        ) from error


def read_channel(settings: ChannelCertificates) -> "grpc.ChannelCredentials | None":
    """Read the credentials of a channel; None without TLS. Raises OSError for an unreadable file."""
    import grpc

    if settings.tls_ca is None:
        return None
    return grpc.ssl_channel_credentials(
        settings.tls_ca.read_bytes(), _read(settings.tls_key), _read(settings.tls_cert)
    )


def _read_server(settings: ServerCertificates) -> "grpc.ServerCredentials | None":
    import grpc

    if settings.tls_cert is None or settings.tls_key is None:
        return None
    chain = [(settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())]
    ca = _read(settings.tls_client_ca)
    return grpc.ssl_server_credentials(chain, ca, require_client_auth=ca is not None)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def _check_pair(cert: Path | None, key: Path | None) -> None:
    if (cert is None) != (key is None):
        raise ValueError("tls_cert and tls_key belong together: give both or none")
