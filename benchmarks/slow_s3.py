"""A read-only S3 over a folder, with a delay before every answer; for benchmarks.

``python slow_s3.py FOLDER DELAY_MS`` prints the port that it took. It knows what readers of data
use: GET with a range, HEAD, and ListObjectsV2. It asks for no credentials.
"""

import os
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_MOST_KEYS = 1000


class Store(ThreadingHTTPServer):
    """The folders below ``folder`` are the buckets."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, delay_s: float) -> None:
        self.folder, self.delay_s = folder, delay_s
        super().__init__(("127.0.0.1", 0), Answer)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent when a client has gone; say all else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Answer(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Store

    def do_GET(self) -> None:
        """Answer with an object, a part of it, or a listing."""
        time.sleep(self.server.delay_s)
        asked = urlsplit(self.path)
        words = {name: values[0] for name, values in parse_qs(asked.query).items()}
        bucket, _, key = unquote(asked.path).lstrip("/").partition("/")
        path = self.server.folder / bucket / key
        if self.command == "GET" and not key:
            self._listing(bucket, words)
        elif path.is_file():
            self._object(path)
        elif self.command == "HEAD" and not key and path.is_dir():
            self._head(200, {"Content-Length": "0"})
        else:
            self._text(404, "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")

    def do_HEAD(self) -> None:
        """Answer as to a GET, without the object."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def _object(self, path: Path) -> None:
        size = path.stat().st_size
        begin, end, status = 0, size, 200
        about = {"ETag": f'"{size}"', "Accept-Ranges": "bytes"}
        about["Last-Modified"] = formatdate(path.stat().st_mtime, usegmt=True)
        if (asked := self.headers.get("Range", "")).startswith("bytes="):
            low, _, high = asked.removeprefix("bytes=").partition("-")
            begin = int(low) if low else max(size - int(high), 0)
            end = min(int(high) + 1, size) if low and high else size
            status, about["Content-Range"] = 206, f"bytes {begin}-{end - 1}/{size}"
        self._head(status, about | {"Content-Length": str(end - begin)})
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            while begin < end:  # the kernel sends, this process copies nothing
                begin += os.sendfile(self.wfile.fileno(), file.fileno(), begin, end - begin)

    def _listing(self, bucket: str, words: dict[str, str]) -> None:
        prefix, delimiter = words.get("prefix", ""), words.get("delimiter", "")
        after = words.get("continuation-token") or words.get("start-after") or ""
        most = min(int(words.get("max-keys", _MOST_KEYS)), _MOST_KEYS)
        items, last, more = list[str](), "", False
        for name, size in self._names(bucket, prefix, delimiter):
            if name <= after:
                continue
            if len(items) == most:
                more = True
                break
            last = name
            items.append(
                f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                if size is None
                else f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;{size}"
                "&quot;</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        self._text(
            200,
            '<?xml version="1.0"?><ListBucketResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(items)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(items)}"
            "</ListBucketResult>",
        )

    def _names(self, bucket: str, prefix: str, delimiter: str) -> Iterator[tuple[str, int | None]]:
        """Yield (key, size) in order; a prefix up to the delimiter has no size."""
        root = self.server.folder / bucket
        files = {str(p.relative_to(root)): p.stat().st_size for p in root.rglob("*") if p.is_file()}
        seen = ""
        for key in sorted(name for name in files if name.startswith(prefix)):
            head, found, _ = key[len(prefix) :].partition(delimiter or "\0")
            if not found:
                yield key, files[key]
            elif prefix + head != seen:
                seen = prefix + head
                yield seen + delimiter, None

    def _text(self, status: int, text: str) -> None:
        body = text.encode()
        self._head(status, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, about: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()


if __name__ == "__main__":
    store = Store(Path(sys.argv[1]).resolve(), float(sys.argv[2]) / 1000)
    print(store.server_port, flush=True)
    store.serve_forever()
