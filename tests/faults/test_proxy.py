"""The proxy carries what it is given, and breaks as it is told."""

import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks.faults.proxy import Proxy

PATIENCE_SECONDS = 20.0


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says again whatever it hears."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection:
                try:
                    while data := connection.recv(65536):
                        connection.sendall(data)
                except OSError:
                    return

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    """A proxy to the server."""
    made = Proxy(echo)
    yield made
    made.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS)


def echoed(connection: socket.socket, data: bytes) -> bytes:
    """What comes back for `data`, as long as it should be."""
    connection.sendall(data)
    found = b""
    while len(found) < len(data) and (more := connection.recv(65536)):
        found += more
    return found


def speak_until_it_breaks(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        while echoed(connection, b"hello"):
            pass
        raise ConnectionError("the connection was closed")


def test_data_goes_both_ways_unchanged(proxy: Proxy) -> None:
    data = bytes(range(256)) * 400
    with connect(proxy) as one, connect(proxy) as other:
        assert echoed(one, data) == data
        assert echoed(other, data[::-1]) == data[::-1]


def test_a_cut_resets_the_connections_of_now_and_no_later_ones(proxy: Proxy) -> None:
    with connect(proxy) as before:
        assert echoed(before, b"hello") == b"hello"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            echoed(before, b"hello")
    with connect(proxy) as after:
        assert echoed(after, b"hello") == b"hello"


def test_a_refusing_proxy_breaks_each_connection_until_it_is_healed(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionError):
        speak_until_it_breaks(proxy)
    proxy.heal()
    with connect(proxy) as healed:
        assert echoed(healed, b"hello") == b"hello"


def test_what_is_held_comes_when_the_proxy_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        assert echoed(connection, b"hello") == b"hello"
        proxy.hold()
        connection.sendall(b"held")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(10)
        proxy.heal()
        connection.settimeout(PATIENCE_SECONDS)
        assert connection.recv(10) == b"held"


def test_a_slow_proxy_loses_nothing(proxy: Proxy) -> None:
    proxy.slow(0.02)
    with connect(proxy) as connection:
        assert echoed(connection, bytes(200_000)) == bytes(200_000)


def test_a_target_that_is_not_there_is_a_broken_connection(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    lonely = Proxy(port)
    with pytest.raises(ConnectionError):
        speak_until_it_breaks(lonely)
    lonely.close()
