"""An S3 server in this process: moto, which keeps objects in memory and believes everybody."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
from botocore.config import Config
from botocore.session import get_session
from moto.server import ThreadedMotoServer

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "CANARY-s3cr3t",
    "AWS_SESSION_TOKEN": "CANARY-t0ken",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve; the value is ``host:port``."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"{host}:{port}"
    finally:
        server.stop()


@lru_cache
def client(address: str):  # type: ignore[no-untyped-def]  # botocore has no types
    """Return a client of the tests' own, to look at a server past rayway."""
    return get_session().create_client(
        "s3",
        endpoint_url=f"http://{address}",
        region_name="us-east-1",
        aws_access_key_id="other",
        aws_secret_access_key="other",
        config=Config(retries={"total_max_attempts": 1}),
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
    monkeypatch.delenv("AWS_PROFILE", raising=False)
