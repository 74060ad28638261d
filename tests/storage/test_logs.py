"""Logs in a store where objects cannot grow."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fault_proxy import FaultProxy, refuse, reset
from rayway.errors import StorageError
from rayway.storage.logs import SEGMENT_BYTES, is_more, more_of, segment_key
from rayway.storage.objects import Objects
from rayway.storage.retry import Retry
from rayway.storage.runs import RunFolder, events_key

LINE = b"x" * 1023 + b"\n"


def log_of(objects: Objects, key: str) -> bytes:
    with objects.open_log(key) as log:
        return log.read()


def test_segments_are_named_after_the_log() -> None:
    assert segment_key("a/log", 0) == "a/log"
    assert segment_key("a/log", 12) == "a/log.more/000012"
    assert more_of("a/log") == "a/log.more"
    assert is_more("a/log.more/000012")
    assert not is_more("a/log")


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), min_size=1, max_size=10))
def test_a_log_is_what_was_appended_whoever_goes_on_with_it(
    storage: str, batches: list[tuple[int, bool]]
) -> None:
    objects, expected = Objects(storage), bytearray()
    objects.delete_folder("a")
    for number, (lines, by_another) in enumerate(batches):
        data = f"{number}\n".encode() + LINE * lines
        if by_another:
            objects = Objects(storage)
        objects.append("a/log", data)
        expected += data
    assert log_of(objects, "a/log") == expected
    with objects.open_log("a/log") as log:
        middle = len(expected) // 2
        log.seek(middle)
        assert log.read() == expected[middle:]


def test_adding_to_a_long_log_is_one_request_of_bounded_size(s3: str, proxy: FaultProxy) -> None:
    objects = Objects(s3)
    objects.append("log", b"")
    with proxy.counted() as calls:
        for _ in range(20):
            objects.append("log", LINE * 100)
    assert calls == {"PUT": 20}
    sizes = [info.bytes for info in objects.list()]
    assert len(sizes) > 5
    assert max(sizes) < SEGMENT_BYTES + 100 * len(LINE)
    assert log_of(objects, "log") == LINE * 2000


def test_reading_a_short_log_is_two_requests(s3: str, proxy: FaultProxy) -> None:
    objects = Objects(s3)
    objects.append("log", LINE)
    with proxy.counted() as calls:
        assert log_of(objects, "log") == LINE
    assert calls == {"HEAD": 1, "GET": 1}


def test_an_append_that_is_tried_again_is_there_once(s3: str, proxy: FaultProxy) -> None:
    objects = Objects(s3, retry=Retry(budget_s=5, first_s=0.01))
    objects.append("log", b"1\n")
    proxy.add(reset(after=True), method="PUT", times=2)
    objects.append("log", b"2\n")
    assert log_of(objects, "log") == b"1\n2\n"


def test_an_append_that_failed_in_the_end_can_be_made_again(s3: str, proxy: FaultProxy) -> None:
    """Also where it had succeeded, and only its answers were lost."""
    objects = Objects(s3, retry=Retry(budget_s=0))
    objects.append("log", b"1\n")
    for fault in (refuse(503), reset(after=True)):
        proxy.add(fault, method="PUT", times=1)
        with pytest.raises(StorageError, match="cannot write"):
            objects.append("log", b"2\n")
    objects.append("log", b"2\n")
    assert log_of(objects, "log") == b"1\n2\n"


def test_a_log_copied_to_a_disk_and_back_is_the_same(s3: str, tmp_path: Path) -> None:
    bucket, disk, back = Objects(f"{s3}/a"), Objects(str(tmp_path)), Objects(f"{s3}/b")
    for n in range(6):
        bucket.append("log", f"{n}\n".encode() + LINE * 100)
    expected = log_of(bucket, "log")
    for source, target in ((bucket, disk), (disk, back)):
        for info in source.list():
            target.put(info.key, source.get(info.key))
        assert log_of(target, "log") == expected
    back.append("log", b"end\n")
    assert log_of(back, "log") == expected + b"end\n"


def test_a_logs_segments_are_not_logs_of_ranks(s3: str) -> None:
    folder = RunFolder(f"{s3}/a")
    for rank in (0, 1):
        for _ in range(2):
            folder.objects.append(events_key(1, rank), LINE * 300)
    assert len(folder.objects.list()) == 4
    assert folder.event_keys(1) == [events_key(1, 0), events_key(1, 1)]


def test_a_log_begins_anew_after_its_folder_was_deleted(s3: str) -> None:
    objects = Objects(s3)
    objects.at("a").append("log", LINE)
    objects.delete_folder("a")
    objects.append("a/log", b"new\n")
    assert log_of(objects, "a/log") == b"new\n"
