"""An HTTP proxy that does what networks and stores do on bad days, on request and by a seed.

It stands before an S3 server. The Host header is passed on, so signatures stay valid. The first
rule that takes a request decides what happens to it; all requests are written down.
"""

import base64
import random
import re
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self

_CODES = {
    400: "AuthorizationHeaderMalformed",
    403: "AccessDenied",
    404: "NoSuchKey",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass
class Answer:
    """What a server said."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def change(self, name: str, value: str) -> None:
        """Change a header that is there."""
        self.headers = [(n, value if n.lower() == name else v) for n, v in self.headers]


Body = bytes
Action = Callable[["_Handler", Body], Answer | None]
"""Gets a request and its body; returns the answer, or None if the connection is gone."""


def refuse(status: int, code: str | None = None, message: str = "injected") -> Action:
    """Answer with an error of S3 and forward nothing."""

    def act(handler: "_Handler", _body: Body) -> Answer:
        name = code or _CODES.get(status, "Error")
        text = f"<Error><Code>{name}</Code><Message>{message}</Message></Error>".encode()
        return Answer(status, [("Content-Type", "application/xml")], text)

    return act


def reset(*, after: bool) -> Action:
    """Break the connection: before the server hears of it, or after it did what it was asked."""

    def act(handler: "_Handler", body: Body) -> None:
        if after:
            handler.forward(body)
        handler.break_off()

    return act


def delay(seconds: float) -> Action:
    """Forward late."""

    def act(handler: "_Handler", body: Body) -> Answer:
        time.sleep(seconds)
        return handler.forward(body)

    return act


def hang() -> Action:
    """Accept and never answer."""

    def act(handler: "_Handler", _body: Body) -> None:
        handler.proxy.closing.wait(120)
        handler.break_off()

    return act


def shorten_upload(length: int) -> Action:
    """Let the server store the first bytes only, and say 200 all the same."""
    return lambda handler, body: handler.forward(body[:length])


def cut_answer(length: int) -> Action:
    """Send the first bytes of the answer's body, then break the connection."""

    def act(handler: "_Handler", body: Body) -> None:
        answer = handler.forward(body)
        handler.send(Answer(answer.status, answer.headers, answer.body[:length]), len(answer.body))
        handler.break_off()

    return act


def flip_bit(byte: int, *, hide: bool = False) -> Action:
    """Change one bit of the answer's body; ``hide`` makes its checksum fit again."""

    def act(handler: "_Handler", body: Body) -> Answer:
        answer = handler.forward(body)
        data = bytearray(answer.body)
        if data:
            data[byte % len(data)] ^= 1
        answer.body = bytes(data)
        if hide:
            crc = zlib.crc32(answer.body).to_bytes(4, "big")
            answer.change("x-amz-checksum-crc32", base64.b64encode(crc).decode())
        return answer

    return act


def wrong_checksum() -> Action:
    """Give the answer a checksum that is not its body's."""

    def act(handler: "_Handler", body: Body) -> Answer:
        answer = handler.forward(body)
        answer.change("x-amz-checksum-crc32", "AAAAAA==")
        return answer

    return act


def trickle(bytes_per_s: float) -> Action:
    """Send the answer's body slowly."""

    def act(handler: "_Handler", body: Body) -> Answer:
        answer = handler.forward(body)
        handler.bytes_per_s = bytes_per_s
        return answer

    return act


@dataclass
class Rule:
    """Which requests something happens to."""

    action: Action
    method: str = ""
    """A regular expression that fits all of the method; empty: any."""

    path: str = ""
    """A regular expression that is found in the path and query."""

    after: int = 0
    """The first so many matches pass."""

    times: int | None = None
    """It happens so many times; None: always."""

    probability: float = 1.0
    matches: int = 0
    hits: int = 0

    def takes(self, method: str, path: str, draw: random.Random) -> bool:
        """Return whether it is this request's turn."""
        if (self.method and not re.fullmatch(self.method, method)) or not re.search(
            self.path, path
        ):
            return False
        self.matches += 1
        if self.matches <= self.after or (self.times is not None and self.hits >= self.times):
            return False
        if draw.random() >= self.probability:
            return False
        self.hits += 1
        return True


@dataclass
class FaultProxy:
    """The proxy. ``with`` starts and ends it.

    Args:
        upstream: ``host:port`` of the server behind.
        seed: Of the draws for rules with a probability.
    """

    upstream: str
    seed: int = 0
    rules: list[Rule] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self.forget(seed=self.seed)

    def forget(self, *, seed: int) -> None:
        """Be as new."""
        with self._lock:
            self.rules.clear()
            self.requests.clear()
            self._draw = random.Random(seed)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, action: Action, **where: Any) -> Rule:
        """Make something happen from now on."""
        rule = Rule(action, **where)
        self.rules.append(rule)
        return rule

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Count the requests of a block by what they ask for, as S3 names it."""
        count: Counter[str] = Counter()
        begin = len(self.requests)
        yield count
        count.update(operation(method, path) for method, path in self.requests[begin:])

    def pick(self, method: str, path: str) -> Rule | None:
        """Return the rule that takes a request."""
        with self._lock:
            self.requests.append((method, path))
            return next((r for r in self.rules if r.takes(method, path, self._draw)), None)


def operation(method: str, path: str) -> str:
    """Return what S3 calls a request, roughly."""
    query = path.partition("?")[2]
    if "uploadId=" in query or re.search(r"\buploads\b", query):
        return f"{method} upload"
    if method == "GET" and "list-type" in query:
        return "LIST"
    if method == "POST":
        return "DELETE many"
    return method


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent apart, which costs 40 ms
    proxy: ClassVar[FaultProxy]
    bytes_per_s: float | None = None

    def handle_one_request(self) -> None:
        self.bytes_per_s = None
        super().handle_one_request()

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        rule = self.proxy.pick(self.command, self.path)
        answer = rule.action(self, body) if rule else self.forward(body)
        if answer is not None:
            self.send(answer, len(answer.body))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815 - names of http.server

    def forward(self, body: Body) -> Answer:
        """Ask the server behind."""
        host, _, port = self.proxy.upstream.partition(":")
        connection = HTTPConnection(host, int(port), timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in {"content-length", "expect", "connection"}:
                    connection.putheader(name, value)
            if body or self.command in {"PUT", "POST"}:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())
        except (OSError, HTTPException):
            return refuse(502, "BadGateway", "the server behind does not answer")(self, b"") or (
                Answer(502, [], b"")
            )
        finally:
            connection.close()

    def send(self, answer: Answer, length: int) -> None:
        """Answer; ``length`` is what the body is said to have."""
        self.send_response_only(answer.status)
        skipped = {"transfer-encoding", "connection", "content-length"}
        told = {name.lower(): value for name, value in answer.headers}
        for name, value in answer.headers:
            if name.lower() not in skipped:
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        if is_head and "content-length" in told:
            self.send_header("Content-Length", told["content-length"])
        elif answer.status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if not is_head:
            self._send_body(answer.body)

    def _send_body(self, body: bytes) -> None:
        if self.bytes_per_s is None:
            self.wfile.write(body)
            return
        for start in range(0, len(body), piece := max(int(self.bytes_per_s / 20), 1)):
            self.wfile.write(body[start : start + piece])
            self.wfile.flush()
            if self.proxy.closing.wait(piece / self.bytes_per_s):
                return

    def break_off(self) -> None:
        """Reset the connection, as a crashed host does."""
        self.close_connection = True
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Quiet."""
