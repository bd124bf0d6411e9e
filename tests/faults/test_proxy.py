"""The proxy forwards data unchanged, and breaks, stalls and delays connections."""

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from faults.rig.ports import local_ports
from faults.rig.proxy import Proxy

PATIENCE_SECONDS = 20.0


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that echoes all data."""
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
    """A proxy to the echo server."""
    made = Proxy(echo)
    yield made
    made.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS)


def echo_back(connection: socket.socket, data: bytes) -> bytes:
    """The echo of `data`, up to its length."""
    connection.sendall(data)
    found = b""
    while len(found) < len(data) and (more := connection.recv(65536)):
        found += more
    return found


def send_until_it_breaks(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        while echo_back(connection, b"hello"):
            pass
        raise ConnectionError("the connection was closed")


def test_data_goes_both_ways_unchanged(proxy: Proxy) -> None:
    data = bytes(range(256)) * 400
    with connect(proxy) as one, connect(proxy) as other:
        assert echo_back(one, data) == data
        assert echo_back(other, data[::-1]) == data[::-1]


def test_a_cut_resets_open_connections_and_no_later_ones(proxy: Proxy) -> None:
    with connect(proxy) as before:
        assert echo_back(before, b"hello") == b"hello"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            echo_back(before, b"hello")
    with connect(proxy) as after:
        assert echo_back(after, b"hello") == b"hello"


def test_a_refusing_proxy_breaks_each_connection_until_it_is_healed(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionError):
        send_until_it_breaks(proxy)
    proxy.heal()
    with connect(proxy) as healed:
        assert echo_back(healed, b"hello") == b"hello"


def test_stalled_data_arrives_when_the_proxy_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        assert echo_back(connection, b"hello") == b"hello"
        proxy.stall()
        connection.sendall(b"stalled")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(10)
        proxy.heal()
        connection.settimeout(PATIENCE_SECONDS)
        assert connection.recv(10) == b"stalled"


def test_a_one_way_stall_swallows_answers_and_no_requests(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        proxy.stall("answers")
        connection.sendall(b"asked")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(10)
        proxy.heal()
        connection.settimeout(PATIENCE_SECONDS)
        assert connection.recv(10) == b"asked"


def test_a_request_with_a_mark_and_those_behind_it_are_held_back(proxy: Proxy) -> None:
    with connect(proxy) as connection, connect(proxy) as other:
        proxy.stall_at(b"MARK")
        assert echo_back(connection, b"before") == b"before"
        connection.sendall(b"the MARK")
        assert proxy.marked.wait(PATIENCE_SECONDS)
        other.sendall(b"behind it")
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.recv(10)
        proxy.heal()
        connection.settimeout(PATIENCE_SECONDS)
        other.settimeout(PATIENCE_SECONDS)
        assert connection.recv(20) == b"the MARK"
        assert other.recv(20) == b"behind it"


def test_of_a_pair_that_is_parted_the_others_go_on(proxy: Proxy) -> None:
    child = (
        "import socket, sys\n"
        f"peer = socket.create_connection(('127.0.0.1', {proxy.port}))\n"
        "for line in sys.stdin:\n"
        "    peer.sendall(line.encode()); print(peer.recv(100).decode().strip(), flush=True)\n"
    )
    with (
        connect(proxy) as other,
        subprocess.Popen(
            [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def send(line: str) -> None:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()

        send("before\n")
        assert process.stdout.readline() == "before\n"
        proxy.part(lambda: local_ports(process.pid))
        send("parted\n")
        assert echo_back(other, b"hello") == b"hello"
        with connect(proxy) as new:
            assert echo_back(new, b"hello") == b"hello"
        assert select.select([process.stdout], [], [], 0.2)[0] == []
        proxy.heal()
        assert process.stdout.readline() == "parted\n"
        process.stdin.close()


def test_a_slow_proxy_loses_nothing(proxy: Proxy) -> None:
    proxy.delay(0.02)
    with connect(proxy) as connection:
        assert echo_back(connection, bytes(200_000)) == bytes(200_000)


def test_a_missing_target_is_a_broken_connection(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    without_target = Proxy(port)
    with pytest.raises(ConnectionError):
        send_until_it_breaks(without_target)
    without_target.close()
