"""The proxy that other tests trust: each fault is what it says."""

import base64
import sys
import time
import zlib
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_proxy import (
    FaultProxy,
    cut_answer,
    delay,
    flip_bit,
    hang,
    operation,
    refuse,
    reset,
    shorten_upload,
    trickle,
    wrong_checksum,
)


class Shelf(BaseHTTPRequestHandler):
    """Keeps one body and gives it back, with its checksum and the Host it was asked by."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    kept = b""
    received = 0

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        Shelf.received += 1
        if self.command == "PUT":
            Shelf.kept = body
        answer = Shelf.kept if self.command in {"GET", "HEAD"} else b""
        self.send_response(200)
        crc = zlib.crc32(answer).to_bytes(4, "big")
        self.send_header("x-amz-checksum-crc32", base64.b64encode(crc).decode())
        self.send_header("x-host", self.headers["Host"])
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_PUT = do_HEAD = do_any  # noqa: N815 - names of http.server

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    Shelf.kept, Shelf.received = b"", 0
    with FaultProxy(f"127.0.0.1:{server.server_address[1]}", seed=1) as proxy:
        yield proxy
    server.shutdown()
    server.server_close()
    thread.join()


def ask(
    proxy: FaultProxy, method: str, path: str = "/a", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(proxy.url.removeprefix("http://"), timeout=5)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, told, answer.read()
    finally:
        connection.close()


def test_without_faults_it_is_not_there(proxy: FaultProxy) -> None:
    assert ask(proxy, "PUT", body=b"twelve bytes", Host="s3.example")[0] == 200
    status, headers, body = ask(proxy, "GET", "/a?x=1", Host="s3.example")
    assert (status, body, headers["x-host"]) == (200, b"twelve bytes", "s3.example")
    status, headers, body = ask(proxy, "HEAD")
    assert (status, body, headers["content-length"]) == (200, b"", "12")
    assert proxy.requests == [("PUT", "/a"), ("GET", "/a?x=1"), ("HEAD", "/a")]


def test_a_client_that_asks_first_is_told_to_go_on(proxy: FaultProxy) -> None:
    connection = HTTPConnection(proxy.url.removeprefix("http://"), timeout=5)
    connection.request("PUT", "/a", b"body", {"Expect": "100-continue"})
    assert connection.getresponse().status == 200
    connection.close()
    assert Shelf.kept == b"body"


def test_a_refusal_is_not_forwarded_and_is_s3s(proxy: FaultProxy) -> None:
    proxy.add(refuse(503))
    status, _, body = ask(proxy, "PUT", body=b"1")
    assert (status, Shelf.received) == (503, 0)
    assert b"<Code>SlowDown</Code>" in body
    proxy.rules.clear()
    proxy.add(refuse(403, "InvalidAccessKeyId"))
    assert b"InvalidAccessKeyId" in ask(proxy, "GET")[2]
    assert ask(proxy, "HEAD")[2] == b""


@pytest.mark.parametrize("after", [False, True])
def test_a_reset_is_before_or_after_the_server_did_it(proxy: FaultProxy, after: bool) -> None:
    proxy.add(reset(after=after))
    with pytest.raises((ConnectionError, HTTPException)):
        ask(proxy, "PUT", body=b"1")
    assert Shelf.kept == (b"1" if after else b"")


def test_an_upload_is_shortened_with_a_success(proxy: FaultProxy) -> None:
    proxy.add(shorten_upload(3), method="PUT")
    assert ask(proxy, "PUT", body=b"twelve bytes")[0] == 200
    assert Shelf.kept == b"twe"


def test_an_answer_is_cut_or_changed(proxy: FaultProxy) -> None:
    ask(proxy, "PUT", body=b"twelve bytes")
    rule = proxy.add(cut_answer(3), method="GET")
    with pytest.raises((IncompleteRead, ConnectionError)):
        ask(proxy, "GET")
    rule.action = flip_bit(0)
    _, before, body = ask(proxy, "GET")
    assert body == b"uwelve bytes"
    rule.action = flip_bit(0, hide=True)
    _, headers, _ = ask(proxy, "GET")
    crc = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    assert headers["x-amz-checksum-crc32"] == crc != before["x-amz-checksum-crc32"]
    rule.action = wrong_checksum()
    _, headers, body = ask(proxy, "GET")
    assert (body, headers["x-amz-checksum-crc32"]) == (b"twelve bytes", "AAAAAA==")


def test_time_is_taken(proxy: FaultProxy) -> None:
    ask(proxy, "PUT", body=bytes(500))
    for action, least in ((delay(0.2), 0.2), (trickle(1000), 0.4)):
        proxy.rules.clear()
        proxy.add(action)
        begun = time.monotonic()
        assert ask(proxy, "GET")[2] == bytes(500)
        assert least <= time.monotonic() - begun < 3
    proxy.rules.clear()
    proxy.add(hang())
    connection = HTTPConnection(proxy.url.removeprefix("http://"), timeout=0.3)
    connection.request("GET", "/a")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


def test_rules_choose_by_method_path_count_and_draw(proxy: FaultProxy) -> None:
    proxy.add(refuse(500), method="GET|HEAD", path="^/b", after=1, times=2)
    asked = [("GET", "/b"), ("PUT", "/b"), ("GET", "/a/b"), ("GET", "/b"), ("HEAD", "/b")]
    statuses = [ask(proxy, method, path)[0] for method, path in [*asked, ("GET", "/b")]]
    assert statuses == [200, 200, 200, 500, 500, 200]

    def draws() -> list[int]:
        proxy.forget(seed=5)
        proxy.add(refuse(500), probability=0.5)
        return [ask(proxy, "GET")[0] for _ in range(30)]

    first = draws()
    assert first == draws()
    assert 5 < first.count(500) < 25


def test_requests_are_counted_by_what_they_ask_for(proxy: FaultProxy) -> None:
    with proxy.counted() as calls:
        ask(proxy, "GET", "/b?list-type=2&prefix=x")
        ask(proxy, "GET", "/b/k")
        ask(proxy, "PUT", "/b/k?partNumber=1&uploadId=u")
    assert calls == {"LIST": 1, "GET": 1, "PUT upload": 1}
    assert operation("POST", "/b/k?uploads") == "POST upload"
    assert operation("POST", "/b?delete") == "DELETE many"


def test_a_dead_server_is_a_bad_gateway() -> None:
    with FaultProxy("127.0.0.1:9") as proxy:
        assert ask(proxy, "GET")[0] == 502
