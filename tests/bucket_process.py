"""A real server that speaks S3, as a process: moto, which keeps its buckets in memory."""

import http.client
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import pytest
from obstore.store import S3Store

from faults.rig.ports import free_port
from kvstore.tiers.bucket.address import BucketAddress

Until = Callable[..., None]
_REGION = "us-east-1"


class BucketProcess:
    """moto's server on a free port. `kill` loses its buckets; after `stop` it is silent and has them."""

    def __init__(self, until: Until) -> None:
        self.port = free_port()
        self._until = until
        self.start()

    @staticmethod
    @contextmanager
    def started(until: Until) -> "Iterator[BucketProcess]":
        """A server that ends with the block."""
        process = BucketProcess(until)
        try:
            yield process
        finally:
            process.go_on()
            process.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, also again after `kill`, and wait until it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._until(self._answers, f"a server on port {self.port} answers")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Freeze it: connections open, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after `stop`."""
        self._process.send_signal(signal.SIGCONT)

    def create_bucket(self, environment: pytest.MonkeyPatch) -> BucketAddress:
        """Create a bucket of a new name; its credentials are in the environment until the test ends."""
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
        address = BucketAddress(f"pages-{uuid4().hex}", "kvrecall", self.url, _REGION)
        self.create(address)
        return address

    def create(self, address: BucketAddress) -> None:
        """Create a bucket, also one that was there before a `kill`."""
        assert self.send("PUT", f"/{address.bucket}") == 200

    def delete_bucket(self, address: BucketAddress) -> None:
        """Delete a bucket with all its objects."""
        self._connect(address).delete(self.list_objects(address))
        assert self.send("DELETE", f"/{address.bucket}") == 204

    def list_objects(self, address: BucketAddress) -> list[str]:
        """Names of a bucket's objects, asked of the server."""
        return sorted(each["path"] for each in self._connect(address).list().collect())

    def write_object(self, address: BucketAddress, name: str, content: bytes) -> None:
        """Replace an object's content behind everybody's back."""
        self._connect(address).put(name, content)

    def delete_object(self, address: BucketAddress, name: str) -> None:
        """Delete an object behind everybody's back."""
        self._connect(address).delete(name)

    def send(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a request; returns the status of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def _connect(self, address: BucketAddress) -> S3Store:
        return S3Store(
            address.bucket,
            endpoint=self.url,
            region=_REGION,
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True},
        )

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended"
        with suppress(OSError):
            return self.send("GET", "/moto-api/") == 200
        return False
