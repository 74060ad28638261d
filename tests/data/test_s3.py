"""Case H17 and the ways in which a bucket can be set up wrongly."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from rayway.data.files import filesystem_for
from rayway.data.groups import Groups
from rayway.data.index import build_index
from rayway.errors import DataError

SECRET = "canary-secret"
Upload = Callable[[str, Path], str]


@pytest.fixture
def filled(bucket: Any, uneven: Path) -> Any:
    for file in uneven.iterdir():
        bucket.objects[f"set/{file.name}"] = file.read_bytes()
    return bucket


def refused(url: str = "s3://bucket/set", *, within_s: float = 15) -> str:
    """Return why the data cannot be indexed; it has to be said soon and without the secret."""
    begin = time.monotonic()
    with pytest.raises(DataError) as caught:
        build_index(url)
    assert time.monotonic() - begin < within_s
    chain: BaseException | None = caught.value
    while chain is not None:
        assert SECRET not in str(chain)
        chain = chain.__cause__
    return str(caught.value)


def test_a_real_server_gives_what_the_disk_gives(s3: Upload, uneven: Path) -> None:
    url = s3("real", uneven)
    index, local = build_index(url), build_index(str(uneven))
    assert index.fingerprint == local.fingerprint
    assert index.rows.tolist() == local.rows.tolist()
    assert build_index(f"{url}/part-00[0-3].parquet").total == local.first[(local.shard < 4).sum()]
    assert build_index(f"{url}/part-002.parquet").paths == ("part-002.parquet",)
    assert build_index("s3://real/s*/part-00*").paths[0] == "set/part-000.parquet"
    index.check_unchanged()


def test_more_than_a_page_of_objects_is_listed(s3: Upload, tmp_path: Path, uneven: Path) -> None:
    content = (uneven / "part-000.parquet").read_bytes()
    for number in range(1010):
        (tmp_path / f"{number:04}.parquet").write_bytes(content if number % 300 == 0 else b"")
    with pytest.raises(DataError, match=r"0001\.parquet is empty"):
        build_index(s3("many", tmp_path))
    assert len(build_index("s3://many/set/0[0369]00.parquet").paths) == 4


def test_a_bucket_that_is_not_there_is_named(s3: Upload, uneven: Path) -> None:
    s3("real", uneven)
    told = refused("s3://not-there/set")
    assert "s3://not-there/set/ cannot be listed: NoSuchBucket" in told
    assert "Check the name of the bucket and the endpoint." in told


def test_a_folder_that_is_not_there_is_named(filled: Any) -> None:
    assert "s3://bucket/nowhere holds no object" in refused("s3://bucket/nowhere")


@pytest.mark.parametrize(
    ("code", "repair"),
    [
        ("InvalidAccessKeyId", "does not know this access key"),
        ("SignatureDoesNotMatch", "secret key does not belong"),
        ("AccessDenied", "s3:ListBucket"),
        ("ExpiredToken", "get new ones"),
    ],
)
def test_wrong_credentials_are_told_with_their_source(filled: Any, code: str, repair: str) -> None:
    filled.fail(".*", code=code, message=f"No, {SECRET} is wrong.")
    told = refused()
    for words in ("s3://bucket/set", code, os.environ["AWS_ENDPOINT_URL"], repair):
        assert words in told
    assert "credentials: the environment (AWS_ACCESS_KEY_ID)" in told


def test_the_third_file_alone_may_be_forbidden(filled: Any) -> None:
    filled.fail(r"(GET|HEAD) set/part-002\.parquet", code="AccessDenied")
    told = refused()
    assert "s3://bucket/set/part-002.parquet cannot be read: AccessDenied" in told
    assert "s3:GetObject" in told


def test_no_credentials_at_all_reads_a_public_bucket(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert len(build_index("s3://bucket/set").paths) == 9
    assert filled.credentials == {""}
    filled.fail(".*")
    told = refused()
    assert "credentials: none found" in told
    assert "Set credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in told


def test_a_profile_gives_credentials_region_and_endpoint(
    filled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config").write_text(
        f"[profile work]\nregion = eu-north-1\nendpoint_url = {endpoint}\n"
        f"aws_access_key_id = AKIDWORK\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert len(build_index("s3://bucket/set").paths) == 9
    assert filled.credentials == {"AWS4-HMAC-SHA256 Credential=AKIDWORK"}, "listing and reading"
    filesystem, _ = filesystem_for("s3://bucket/set")
    assert isinstance(filesystem, pafs.S3FileSystem)
    assert filesystem.region == "eu-north-1"
    filled.fail(".*", code="InvalidAccessKeyId")
    assert "credentials: profile 'work' (config-file)" in refused()
    monkeypatch.setenv("AWS_PROFILE", "play")
    assert "The config profile (play) could not be found" in refused()


def test_credentials_that_arrow_does_not_know_are_read_through_s3fs(
    filled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config").write_text(
        "[profile sso]\nsso_session = s\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session s]\nsso_region = eu-west-1\nsso_start_url = https://example.invalid\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "sso")
    filesystem, path = filesystem_for("s3://bucket/set")
    assert isinstance(filesystem, pafs.PyFileSystem)
    assert path == "bucket/set"


def test_a_bucket_in_another_region_is_told_with_its_region(filled: Any) -> None:
    headers = {"x-amz-bucket-region": "ap-south-1"}
    filled.fail(".*", status=301, code="PermanentRedirect", message="Elsewhere.", headers=headers)
    assert "Bucket 'bucket' is in region ap-south-1: set AWS_REGION=ap-south-1." in refused()


def test_another_region_is_told_while_reading_too(filled: Any) -> None:
    filled.fail("(HEAD|GET) .*", status=301, code="PermanentRedirect", message="Elsewhere.")
    assert "Bucket 'bucket' is in another region: set AWS_REGION=its region." in refused()


def test_a_closed_port_is_told_at_once(monkeypatch: pytest.MonkeyPatch, bucket: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    told = refused()
    assert "Could not connect to the endpoint" in told
    assert f"endpoint: {address}" in told
    assert "Check that the endpoint is right and answers" in told


def test_tls_to_a_plain_port_is_told(monkeypatch: pytest.MonkeyPatch, filled: Any) -> None:
    address = os.environ["AWS_ENDPOINT_URL"].replace("http:", "https:")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    told = refused()
    assert "SSL" in told
    assert f"endpoint: {address}" in told


def test_a_store_that_is_overloaded_for_a_moment_is_asked_again(filled: Any) -> None:
    filled.fail("LIST", status=503, code="SlowDown", times=1)
    filled.fail(r"GET set/part-00\d\.parquet", status=503, code="SlowDown", times=2)
    assert len(build_index("s3://bucket/set").paths) == 9


def test_a_store_that_stays_overloaded_is_named(filled: Any) -> None:
    filled.fail(r"GET set/part-004\.parquet", status=503, code="SlowDown")
    told = refused()
    assert "s3://bucket/set/part-004.parquet cannot be read: S" in told
    assert "try again later" in told
    assert filled.requests.count("GET set/part-004.parquet") == 4


def test_rows_are_refused_in_the_same_words(filled: Any) -> None:
    index = build_index("s3://bucket/set")
    groups = Groups(index, index.schema.names)
    # Arrow keeps of an answer what fits into the bytes it asked for: of a small group, the status
    filled.fail("(GET|HEAD) .*", message=f"No, {SECRET} is wrong.")
    with pytest.raises(DataError) as caught:
        groups(0)
    told = str(caught.value)
    assert "part-000.parquet (row group 0) cannot be read in 3 tries: AccessDenied" in told
    assert "credentials: the environment (AWS_ACCESS_KEY_ID)" in told
    assert SECRET not in told


def test_a_damaged_file_is_not_laid_at_the_stores_door(filled: Any) -> None:
    index = build_index("s3://bucket/set")
    content = filled.objects["set/part-000.parquet"]
    filled.objects["set/part-000.parquet"] = content[:4] + b"\xff" * 400 + content[404:]
    with pytest.raises(DataError) as caught:
        Groups(index, index.schema.names)(0)
    assert "endpoint" not in str(caught.value)


@pytest.fixture
def hole() -> Iterator[str]:
    """The address of a store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_a_store_that_never_answers_is_told_within_a_minute(
    hole: str, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", hole)
    told = refused(within_s=40)
    assert "Read timeout" in told
    assert f"endpoint: {hole}" in told


@pytest.mark.slow
def test_a_file_that_never_comes_is_told_within_a_minute(filled: Any) -> None:
    filled.fail("(GET|HEAD) .*", hang=True)
    told = refused(within_s=60)
    assert "part-000.parquet cannot be read" in told
    assert "Operation too slow" in told


@pytest.mark.slow
def test_rows_that_never_come_are_told_within_a_minute(filled: Any) -> None:
    index = build_index("s3://bucket/set")
    groups = Groups(index, index.schema.names)
    filled.fail("(GET|HEAD) .*", hang=True)
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"Operation too slow.*credentials: the environment"):
        groups(0)
    assert time.monotonic() - begin < 60
