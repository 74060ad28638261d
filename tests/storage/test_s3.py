"""What S3 does on bad days, and what becomes of it."""

import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fault_proxy import (
    Answer,
    FaultProxy,
    cut_answer,
    flip_bit,
    hang,
    refuse,
    reset,
    shorten_upload,
    trickle,
    wrong_checksum,
)
from rayway.errors import SpecError, StorageError
from rayway.storage.objects import ObjectMissing, Objects
from rayway.storage.retry import Retry
from rayway.storage.s3 import S3Folder
from s3_server import SETTINGS, client, point_at

MB = 1 << 20
PART = 5 * MB  # the least that S3 takes
LARGE = bytes(range(256)) * (12 * MB // 256)  # in three parts


def objects_at(url: str, *, budget_s: float = 5.0, try_s: float = 10.0) -> Objects:
    retry = Retry(budget_s=budget_s, first_s=0.01, longest_s=0.05)
    return Objects(url, folder=S3Folder(url, part_bytes=PART), retry=retry, try_s=try_s)


@pytest.fixture
def objects(s3: str, proxy: FaultProxy) -> Objects:
    return objects_at(f"{s3}/runs")


def uploads(url: str, address: str) -> list[Any]:
    """Return the multipart uploads that were begun and not ended."""
    bucket = url.removeprefix("s3://").partition("/")[0]
    found: list[Any] = client(address).list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return found


# Large objects


def test_a_large_object_goes_in_parts_and_comes_back(
    objects: Objects, proxy: FaultProxy, s3_address: str
) -> None:
    with proxy.counted() as calls:
        objects.put("a", (LARGE[at : at + MB] for at in range(0, len(LARGE), MB)))
    assert calls == {"POST upload": 2, "PUT upload": 3}
    assert objects.get("a") == LARGE
    assert objects.get_range("a", PART - 3, 6 * MB) == LARGE[PART - 3 : PART - 3 + 6 * MB]
    with objects.open_read("a") as file:
        pieces = iter(lambda: file.read(MB), b"")
        assert b"".join(pieces) == LARGE
    assert uploads(objects.url, s3_address) == []


def test_an_object_of_one_part_goes_with_one_request(objects: Objects, proxy: FaultProxy) -> None:
    with proxy.counted() as calls:
        objects.put("a", LARGE[:PART])
    assert calls == {"PUT": 1}
    assert objects.get("a") == LARGE[:PART]


def test_each_part_is_tried_again_for_itself(objects: Objects, proxy: FaultProxy) -> None:
    proxy.add(refuse(503), method="PUT", path="partNumber=2", times=3)
    proxy.add(reset(after=False), method="PUT", path="partNumber=3", times=1)
    proxy.add(reset(after=True), method="PUT", path="partNumber=1", times=1)
    with proxy.counted() as calls:
        objects.put("a", LARGE)
    assert calls == {"POST upload": 2, "PUT upload": 3 + 3 + 1 + 1}
    assert objects.get("a") == LARGE


def test_an_upload_that_fails_is_dropped_and_the_old_object_stays(
    objects: Objects, proxy: FaultProxy, s3_address: str
) -> None:
    def dying() -> Iterator[bytes]:
        yield LARGE
        raise ZeroDivisionError

    objects.put("a", b"old")
    with pytest.raises(ZeroDivisionError):
        objects.put("a", dying())
    refusal = proxy.add(refuse(403), method="PUT", path="partNumber=2")
    with pytest.raises(StorageError, match="AccessDenied"):
        objects.put("a", LARGE)
    proxy.rules.remove(refusal)
    proxy.add(refuse(403), method="POST", path="uploadId")
    with pytest.raises(StorageError, match="AccessDenied"):
        objects.put("a", LARGE)
    assert uploads(objects.url, s3_address) == []
    assert objects.get("a") == b"old"


@pytest.mark.parametrize("knows", [True, False], ids=["200", "404"])
def test_a_finished_upload_whose_answer_was_lost_is_known_by_its_writer(
    objects: Objects, proxy: FaultProxy, knows: bool
) -> None:
    """Asked again, some stores say yes once more; others know of no such upload."""
    proxy.add(reset(after=True), method="POST", path="uploadId", times=1)
    if not knows:
        proxy.add(refuse(404, "NoSuchUpload"), method="POST", path="uploadId")
    objects.put("a", LARGE)
    assert objects.get("a") == LARGE


def test_an_upload_that_somebody_else_dropped_is_no_success(
    objects: Objects, proxy: FaultProxy
) -> None:
    objects.put("a", LARGE[: PART + 1])
    proxy.add(refuse(404, "NoSuchUpload"), method="POST", path="uploadId")
    with pytest.raises(StorageError, match="dropped its upload"):
        objects.put("a", LARGE)
    assert objects.get("a") == LARGE[: PART + 1]


def test_what_a_dead_writer_began_goes_with_its_folder(
    objects: Objects, proxy: FaultProxy, s3_address: str
) -> None:
    folder = S3Folder(objects.url)
    for key in ["step-1/a", "step-10/a"]:
        folder.parts.put(key, folder.parts.begin(key, "w"), 1, memoryview(b"1"))
    objects.put("step-1/b", b"1")
    with proxy.counted() as calls:
        objects.delete_folder("step-1")
    assert calls == {"LIST": 1, "DELETE many": 1, "GET upload": 1, "DELETE upload": 1}
    assert [each["Key"] for each in uploads(objects.url, s3_address)] == ["runs/step-10/a"]


def test_who_may_not_see_unfinished_uploads_can_still_delete(
    objects: Objects, proxy: FaultProxy
) -> None:
    objects.put("a/b", b"1")
    proxy.add(refuse(403), method="GET", path="uploads")
    objects.delete_folder("a")
    assert objects.list() == []


# Ambiguous answers, damage on the way


def test_a_create_whose_answer_was_lost_knows_its_own_bytes(
    objects: Objects, proxy: FaultProxy
) -> None:
    proxy.add(reset(after=True), method="PUT", times=1)
    assert objects.create("a", b"mine")
    assert not objects.create("a", b"theirs")
    assert objects.get("a") == b"mine"


def test_a_create_that_meets_another_one_is_tried_again(
    objects: Objects, proxy: FaultProxy
) -> None:
    proxy.add(refuse(409, "ConditionalRequestConflict"), method="PUT", times=2)
    assert objects.create("a", b"mine")


@pytest.mark.parametrize(
    "damage", [flip_bit(3), cut_answer(3), wrong_checksum()], ids=["bit", "cut", "checksum"]
)
def test_a_record_that_was_damaged_on_its_way_is_read_again(
    objects: Objects, proxy: FaultProxy, damage: Any
) -> None:
    objects.put("a", b"a record")
    rule = proxy.add(damage, method="GET", times=2)
    assert objects.get("a") == b"a record"
    assert rule.hits == 2


def test_a_record_that_is_damaged_each_time_is_refused(objects: Objects, proxy: FaultProxy) -> None:
    objects.put("a", b"a record")
    proxy.add(flip_bit(3), method="GET")
    with pytest.raises(StorageError, match=r"cannot read .*runs/a: .*checksum"):
        objects_at(objects.url, budget_s=0.2).get("a")


def test_a_cut_range_is_fetched_again(objects: Objects, proxy: FaultProxy) -> None:
    objects.put("a", LARGE)
    proxy.add(cut_answer(1000), method="GET", times=4)
    proxy.add(refuse(500), method="GET", probability=0.3)
    assert objects.get("a") == LARGE
    with objects.open_read("a") as file:
        assert file.read() == LARGE


def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(objects: Objects) -> None:
    objects.put("a", LARGE)
    with objects.open_read("a") as file:
        file.read(10)
        objects.put("a", LARGE[::-1])
        with pytest.raises(StorageError, match="Somebody changed it meanwhile"):
            file.read()


def test_an_upload_cut_short_is_seen_by_its_size(objects: Objects, proxy: FaultProxy) -> None:
    """A store that says yes to half an object cannot be caught here; whoever lists, sees it."""
    proxy.add(shorten_upload(4), method="PUT")
    objects.put("a", b"twelve bytes")
    assert [info.bytes for info in objects.list()] == [4]


def test_a_store_that_ignores_ranges_is_refused(objects: Objects, proxy: FaultProxy) -> None:
    def ignore(handler: Any, body: bytes) -> Answer:
        del handler.headers["Range"]
        answer: Answer = handler.forward(body)
        return answer

    objects.put("a", LARGE)
    proxy.add(ignore, method="GET")
    with pytest.raises(StorageError, match="where a range was asked for"):
        objects_at(objects.url, budget_s=0.1).get_range("a", 5, 5)


# Outages, and how long anything takes


@pytest.mark.parametrize("fault", [refuse(503), reset(after=True)], ids=["503", "reset"])
def test_every_call_outlives_an_outage_that_is_shorter_than_the_budget(
    objects: Objects, proxy: FaultProxy, fault: Any
) -> None:
    """The real budget is 90 s, against outages of 60 s; here all is 40 times as fast."""
    calls: list[Any] = [
        lambda: objects.put("a", b"1"),
        lambda: objects.create("b", b"2"),
        lambda: objects.append("log", b"3"),
        lambda: objects.get("old"),
        lambda: objects.exists("old"),
        objects.list,
        objects.folders,
        lambda: objects.delete(["old"]),
        lambda: objects.delete_folder("none"),
    ]
    objects.put("old", b"1")
    for call in calls:
        rule = proxy.add(fault, times=6)
        call()
        assert rule.hits == 6
        proxy.rules.clear()
    assert [info.key for info in objects.list()] == ["a", "b", "log"]
    assert objects.get("log") == b"3"


def test_an_outage_longer_than_the_budget_ends_in_an_error_in_time(
    objects: Objects, proxy: FaultProxy
) -> None:
    proxy.add(refuse(503))
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot write s3://.*/runs/a: SlowDown: injected"):
        objects_at(objects.url, budget_s=1.0).put("a", b"1")
    assert 0.5 < time.monotonic() - begun < 3


def test_random_failures_of_every_third_request_are_ridden_out(
    objects: Objects, proxy: FaultProxy
) -> None:
    proxy.add(refuse(503), probability=0.1)
    proxy.add(refuse(500), probability=0.1)
    proxy.add(reset(after=False), probability=0.1)
    proxy.add(reset(after=True), probability=0.1)
    for n in range(15):
        objects.put(f"a/{n}", f"{n}".encode())
        objects.append("log", f"{n}\n".encode())
        assert objects.create(f"b/{n}", f"{n}".encode())
    objects.put("large", LARGE)
    assert [objects.get(f"a/{n}") for n in range(15)] == [f"{n}".encode() for n in range(15)]
    assert objects.get("log").decode().split() == [str(n) for n in range(15)]
    assert objects.get("large") == LARGE
    assert len(objects.list("b")) == 15


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_MAX_ATTEMPTS", "9"), ("AWS_RETRY_MODE", "legacy")]
)
def test_no_request_is_repeated_by_anybody_but_us(
    s3: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    proxy.add(refuse(503))
    with proxy.counted() as calls, pytest.raises(StorageError):
        objects_at(s3, budget_s=0).put("a", b"1")
    assert calls == {"PUT": 1}


@pytest.mark.parametrize("large", [False, True])
def test_a_store_that_hangs_is_given_up_in_time(
    objects: Objects, proxy: FaultProxy, large: bool
) -> None:
    proxy.add(hang())
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"no answer within 0\.5"):
        objects_at(objects.url, budget_s=0.5, try_s=0.5).put("a", LARGE if large else b"1")
    assert time.monotonic() - begun < 4


def test_a_call_that_hung_once_is_made_again(objects: Objects, proxy: FaultProxy) -> None:
    proxy.add(hang(), times=1)
    objects_at(objects.url, try_s=0.5).put("a", b"1")
    assert objects.get("a") == b"1"


def test_a_store_that_only_trickles_is_given_up_in_time(
    objects: Objects, proxy: FaultProxy
) -> None:
    """Each byte comes in time, so no wait on the socket is ever too long."""
    for n in range(40):
        objects.put(f"{n}", b"x" * 2000)
    proxy.add(trickle(1000.0), method="GET")
    slow = objects_at(objects.url, budget_s=0.3, try_s=0.6)
    for call in (lambda: slow.get("1"), slow.list):
        begun = time.monotonic()
        with pytest.raises(StorageError, match="no answer within"):
            call()
        assert time.monotonic() - begun < 3


# What an error says


def test_an_error_says_what_was_asked_of_whom_with_whose_credentials_and_no_secret(
    objects: Objects, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "CANARY-t0ken")
    secret = SETTINGS["AWS_SECRET_ACCESS_KEY"]
    proxy.add(refuse(403, message=f"no {secret} or CANARY-t0ken for you"))
    with proxy.counted() as calls, pytest.raises(StorageError) as caught:
        objects.put("a", b"1")
    assert sum(calls.values()) == 1  # asking again would not help
    text = str(caught.value)
    for word in [
        f"cannot write {objects.url}/a",
        "AccessDenied",
        "PutObject",
        proxy.url,
        "AWS_ACCESS_KEY_ID",
        "s3:PutObject",
    ]:
        assert word in text
    assert "CANARY" not in text
    assert "CANARY" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refuse(403, "InvalidAccessKeyId"), "does not know this access key"),
        (refuse(403, "SignatureDoesNotMatch"), "secret key does not belong"),
        (refuse(403, "RequestTimeTooSkewed"), "clock"),
        (refuse(403), "s3:PutObject"),
        (refuse(404, "NoSuchBucket"), "Make the bucket"),
        (refuse(400, "AuthorizationHeaderMalformed"), "AWS_REGION"),
        (refuse(400, "ExpiredToken"), "have expired"),
        (refuse(400, "TokenRefreshRequired"), "have expired"),
        (refuse(501, "NotImplemented"), "lacks what rayway needs"),
    ],
)
def test_a_probe_finds_what_is_set_up_wrongly(
    objects: Objects, proxy: FaultProxy, answer: Any, words: str
) -> None:
    proxy.add(answer)
    begun = time.monotonic()
    with pytest.raises(StorageError, match=words):
        objects.probe()
    assert time.monotonic() - begun < 3


def test_a_probe_names_the_buckets_region(objects: Objects, proxy: FaultProxy) -> None:
    def redirect(handler: Any, body: bytes) -> Answer:
        answer = refuse(301, "PermanentRedirect")(handler, body)
        assert answer is not None
        answer.headers.append(("x-amz-bucket-region", "eu-central-1"))
        return answer

    proxy.add(redirect)
    with pytest.raises(StorageError, match=r"is in region (\S+): set AWS_REGION=\1\."):
        objects.probe()


def test_a_probe_finds_a_bucket_that_is_not_there(s3: str) -> None:
    with pytest.raises(StorageError, match=r"NoSuchBucket.*Make the bucket"):
        objects_at(f"{s3}-none/runs").probe()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid"])
def test_a_probe_finds_an_endpoint_that_is_not_there(
    s3: str, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    point_at(monkeypatch, url)
    begun = time.monotonic()
    with pytest.raises(StorageError, match="Check that the endpoint is right") as caught:
        objects_at(s3, budget_s=1).probe()
    assert time.monotonic() - begun < 5
    assert url in str(caught.value)


@pytest.mark.slow
def test_a_probe_of_a_black_hole_ends_within_a_minute(objects: Objects, proxy: FaultProxy) -> None:
    proxy.add(hang())
    begun = time.monotonic()
    with pytest.raises(StorageError, match="no answer within 8 s"):
        Objects(objects.url).probe()
    assert time.monotonic() - begun < 60


def test_a_probe_without_credentials_says_how_to_give_them(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match=r"none found.*Set AWS_ACCESS_KEY_ID"):
        objects.probe()


def test_a_profile_that_does_not_exist_is_named(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match=r"nobody.*Check AWS_PROFILE"):
        objects.probe()


def test_a_bucket_that_cannot_be_one_is_named() -> None:
    with pytest.raises(SpecError, match="names no bucket"):
        Objects("s3:///runs")


def test_a_name_that_no_bucket_has_is_refused(s3: str) -> None:
    with pytest.raises(StorageError, match="Check the bucket's name"):
        Objects("s3://Not A Bucket/runs").probe()


@pytest.mark.parametrize("method", ["PUT", "GET", "POST"])
def test_a_probe_finds_the_right_that_is_missing_and_leaves_nothing(
    objects: Objects, proxy: FaultProxy, method: str
) -> None:
    rule = proxy.add(refuse(403), method=method)
    with pytest.raises(StorageError, match="AccessDenied"):
        objects.probe()
    proxy.rules.remove(rule)
    if method != "POST":  # who may not delete leaves what it wrote
        assert objects.list() == []


def test_a_probe_finds_a_store_that_ignores_conditions(objects: Objects, proxy: FaultProxy) -> None:
    def ignore(handler: Any, body: bytes) -> Answer:
        del handler.headers["If-None-Match"]
        answer: Answer = handler.forward(body)
        return answer

    proxy.add(ignore, method="PUT")
    with pytest.raises(StorageError, match="lets two writers create the same object"):
        objects.probe()
    assert objects.list() == []


def test_a_probe_costs_few_requests(objects: Objects, proxy: FaultProxy) -> None:
    with proxy.counted() as calls:
        objects.probe()
    assert calls == {"PUT": 2, "GET": 2, "LIST": 2, "DELETE many": 1, "GET upload": 1}


# Credentials


def test_credentials_that_expired_are_looked_for_again(
    objects: Objects, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_new(handler: Any, body: bytes) -> Answer | None:
        if "Credential=new/" in handler.headers["Authorization"]:
            answer: Answer = handler.forward(body)
            return answer
        return refuse(400, "ExpiredToken")(handler, body)

    def keys(name: str) -> None:
        text = f"[default]\naws_access_key_id = {name}\naws_secret_access_key = x\n"
        (tmp_path / "credentials").write_text(text)

    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    keys("old")
    objects.put("a", b"1")
    proxy.add(only_new)
    with proxy.counted() as calls, pytest.raises(StorageError, match="profile 'default'"):
        objects.put("a", b"2")
    assert calls == {"PUT": 1}  # the file says the same
    keys("new")
    objects.put("a", b"3")
    assert objects.get("a") == b"3"


# Listing


def test_a_listing_of_many_pages_is_whole(objects: Objects, proxy: FaultProxy) -> None:
    def small_pages(handler: Any, body: bytes) -> Answer:
        handler.path += "&max-keys=3"
        answer: Answer = handler.forward(body)
        return answer

    keys = sorted(f"a/{n}/b" for n in range(10))
    for key in keys:
        objects.put(key, b"1")
    proxy.add(refuse(503), method="GET", path="list-type", after=2, times=2)
    proxy.add(small_pages, method="GET", path="list-type")
    with proxy.counted() as calls:
        assert [info.key for info in objects.list()] == keys
    assert calls == {"LIST": 4 + 2}  # a page is asked for again, not the whole listing
    assert objects.folders("a") == sorted(str(n) for n in range(10))
    objects.delete_folder("a")
    assert objects.list() == []


def test_folder_markers_are_no_objects(s3: str, s3_address: str) -> None:
    bucket = s3.removeprefix("s3://")
    for key in ["runs/", "runs/a/"]:
        client(s3_address).put_object(Bucket=bucket, Key=key, Body=b"")
    objects = objects_at(f"{s3}/runs")
    objects.put("a/b", b"1")
    assert [info.key for info in objects.list()] == ["a/b"]
    assert objects.folders() == ["a"]
    assert not objects.exists("a")


def test_objects_may_lie_at_the_buckets_root(s3: str) -> None:
    objects = objects_at(s3)
    objects.put("a/b", b"1")
    assert objects.at("a").get("b") == b"1"
    assert objects.folders() == ["a"]
    assert Objects(f"{s3}/a/").get("b") == b"1"
    with pytest.raises(ObjectMissing):
        Objects(f"{s3}/a").get("c")
