"""Data sets for the tests of this room, written once a session."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


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


class _Bucket(BaseHTTPRequestHandler):
    """As much of S3 as reading needs: list, head, ranged get. One bucket, from ``objects``."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        key = unquote(url.path).removeprefix("/bucket").removeprefix("/")
        if "list-type" in query:
            self.requests.append("LIST")
            found = (k for k in sorted(self.objects) if k.startswith(query.get("prefix", "")))
            items = "".join(
                f"<Contents><Key>{k}</Key><Size>{len(self.objects[k])}</Size></Contents>"
                for k in found
            )
            self._answer(200, f"<ListBucketResult>{items}</ListBucketResult>".encode())
        elif key not in self.objects:
            self._answer(404, b"")
        else:
            self.requests.append(f"{self.command} {key}")
            content, status = self.objects[key], 200
            if wanted := self.headers.get("Range"):
                low, high = wanted.removeprefix("bytes=").split("-")
                content, status = content[int(low) : int(high) + 1], 206
            self._answer(status, content)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Bucket]]:
    """An S3 server with the empty bucket s3://bucket, reached as a user would reach it."""
    _Bucket.objects, _Bucket.requests = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    yield _Bucket
    server.shutdown()
    server.server_close()
