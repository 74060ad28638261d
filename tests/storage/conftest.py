"""The kinds of storage that all have to behave alike.

With ``RAYWAY_TEST_S3=weed``, S3 is SeaweedFS instead of moto; see ``s3_server``.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

sys.path.insert(0, str(Path(__file__).parents[1]))  # fault_proxy, s3_server

from fault_proxy import FaultProxy
from s3_server import Weed, new_bucket, point_at, s3_server


@pytest.fixture(scope="session")
def s3_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server's host and port."""
    if os.environ.get("RAYWAY_TEST_S3") != "weed":
        with s3_server() as address:
            yield address
        return
    weed = Weed(tmp_path_factory.mktemp("weed"))
    weed.start()
    yield weed.address
    weed.kill()


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket."""
    point_at(monkeypatch, f"http://{s3_address}")
    return f"s3://{new_bucket(s3_address)}"


@pytest.fixture(scope="session")
def _proxy(s3_address: str) -> Iterator[FaultProxy]:
    with FaultProxy(s3_address) as proxy:
        yield proxy


@pytest.fixture
def proxy(s3: str, _proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    """A proxy without faults yet, that stands before the server of the bucket.

    It is the same one all the time: making a client for another one takes longer than most tests.
    """
    _proxy.forget(seed=7)
    point_at(monkeypatch, _proxy.url)
    return _proxy


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of an empty folder on each kind of storage."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3')}/runs"
    elif request.param == "memory":
        yield f"memory://{tmp_path}/runs"
        MemoryFileSystem.store.clear()
    else:
        yield str(tmp_path / "runs")
