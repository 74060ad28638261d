"""Data sets for the tests of this room, written once a session."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.session import get_session
from moto.server import ThreadedMotoServer


def write(folder: Path, counts: list[list[int]]) -> Path:
    """Write a shard per list, a row group per number. Row i has id=i, x=[i, i+1, i+2, i+3]."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema({"id": pa.int64(), "x": pa.list_(pa.float32(), 4), "b": pa.bool_()})
    first = 0
    for number, groups in enumerate(counts):
        with pq.ParquetWriter(folder / f"part-{number:03}.parquet", schema) as writer:
            for rows in groups:
                ids = np.arange(first, first + rows)
                x = (ids[:, None] + np.arange(4)).astype(np.float32).ravel()
                columns = [ids, pa.FixedSizeListArray.from_arrays(pa.array(x), 4), ids % 3 == 0]
                writer.write_table(pa.table(columns, schema=schema))
                first += rows
    return folder


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 shards of 1 to 4 row groups of 1 to 29 rows, about 300 in all."""
    rng = np.random.default_rng(0)
    counts = [rng.integers(1, 30, rng.integers(1, 5)).tolist() for _ in range(9)]
    return write(tmp_path_factory.mktemp("uneven") / "set", counts)


@dataclass
class Fault:
    """What a bucket answers instead, to requests like ``LIST``, ``HEAD key`` or ``GET key``."""

    requests: str
    status: int = 403
    code: str = "AccessDenied"
    message: str = "Access Denied."
    headers: dict[str, str] = field(default_factory=dict)
    times: int | None = None
    hang: bool = False


class _Bucket(BaseHTTPRequestHandler):
    """As much of S3 as reading needs: list, head, ranged get. One bucket, from ``objects``."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []
    credentials: ClassVar[set[str]] = set()
    faults: ClassVar[list[Fault]] = []
    closed: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        key = unquote(url.path).removeprefix("/bucket").removeprefix("/")
        asked = "LIST" if "list-type" in query else f"{self.command} {key}"
        self.requests.append(asked)
        self.credentials.add(self.headers.get("Authorization", "").partition("/")[0])
        if fault := self._fault(asked):
            self._fail(fault)
        elif asked == "LIST":
            found = [k for k in sorted(self.objects) if k.startswith(query.get("prefix", ""))]
            items = "".join(
                f"<Contents><Key>{k}</Key><Size>{len(self.objects[k])}</Size>"
                f"<ETag>&quot;{md5(self.objects[k]).hexdigest()}&quot;</ETag></Contents>"
                for k in found
            )
            self._answer(200, f"<ListBucketResult>{items}</ListBucketResult>".encode())
        elif key not in self.objects:
            self._fail(Fault("", 404, "NoSuchKey", "The specified key does not exist."))
        else:
            content, status = self.objects[key], 200
            if wanted := self.headers.get("Range"):
                low, high = wanted.removeprefix("bytes=").split("-")
                content, status = content[int(low) : int(high) + 1], 206
            self._answer(status, content)

    @classmethod
    def fail(cls, requests: str, **answer: Any) -> None:
        """Answer requests that fit a regular expression with an error; see :class:`Fault`."""
        cls.faults.append(Fault(requests, **answer))

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _fault(self, asked: str) -> Fault | None:
        for fault in self.faults:
            if re.fullmatch(fault.requests, asked) and fault.times != 0:
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def _fail(self, fault: Fault) -> None:
        if fault.hang:
            self.closed.wait()
            return
        text = f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
        self._answer(fault.status, text.encode(), fault.headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _as_user(monkeypatch: pytest.MonkeyPatch, home: Path, endpoint: str) -> None:
    """Set up S3 as a user does by variables, and hide what this machine has."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDCANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[_Bucket]]:
    """An S3 server with the empty bucket s3://bucket, which fails as it is told to."""
    _Bucket.objects, _Bucket.requests, _Bucket.faults = {}, [], []
    _Bucket.credentials, _Bucket.closed = set(), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    _as_user(monkeypatch, tmp_path / "home", f"http://127.0.0.1:{server.server_port}")
    yield _Bucket
    _Bucket.closed.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of a whole S3 server, in memory."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, Path], str]:
    """Put all files of a folder into a bucket of a real S3 server; gives their URL."""
    _as_user(monkeypatch, tmp_path / "home", moto)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    client = get_session().create_client("s3")

    def upload(name: str, folder: Path) -> str:
        with suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(
                Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
            )
        for file in folder.rglob("*"):
            if file.is_file():
                key = f"set/{file.relative_to(folder)}"
                client.put_object(Bucket=name, Key=key, Body=file.read_bytes())
        return f"s3://{name}/set"

    return upload
