"""Objects in an S3 bucket: one method, one request.

Requests are made by botocore, which here repeats nothing by itself: ``Objects`` does, within one
budget. A body is sent with its CRC, which the store keeps, and which a whole read is checked by.
"""

import base64
import io
import os
import threading
import zlib
from contextlib import closing, suppress
from typing import Any, BinaryIO, NoReturn

from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.parsers import ResponseParserError

from rayway.storage.account import Account, code_of, explain_s3, find_account, has_expired
from rayway.storage.background import check_time
from rayway.storage.failures import is_transient
from rayway.storage.folder import Chunks, Names, Page, Piece, Stamp

_PART_BYTES = 16 << 20
_CONNECT_S, _READ_S = 5, 20  # longest waits on a socket; Objects limits the call as a whole
_SMALL_BYTES = 64 << 10  # such a body is sent at once, without asking the store first
_DELETE_AT_ONCE = 1000  # S3's own limit
_PASSING_CODES = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
}
_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_PASSING = (
    CredentialRetrievalError,  # the machine's role is asked over the network as well
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoConnectionError,
    ResponseParserError,
    ResponseStreamingError,
)
_WRITER = "rayway-writer"
_CONFIG = Config(
    connect_timeout=_CONNECT_S,
    read_timeout=_READ_S,
    retries={"total_max_attempts": 1, "mode": "standard"},
    max_pool_connections=32,
    request_checksum_calculation="when_required",  # we send our own, see _body
    response_checksum_validation="when_required",  # asked for, see fetch
    tcp_keepalive=True,
)


class S3Folder:
    """A folder of a bucket. Methods raise botocore's errors; keys are already checked.

    Args:
        url: ``s3://bucket`` or ``s3://bucket/prefix``.
        part_bytes: Larger objects are sent and fetched in pieces of this size; S3 takes no parts
            below 5 MiB.

    Raises:
        ValueError: The URL names no bucket.
    """

    is_local = False
    is_shared = True
    append = None

    def __init__(self, url: str, *, part_bytes: int = _PART_BYTES) -> None:
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not self._bucket:
            raise ValueError("it names no bucket")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.parts = _S3Parts(self, part_bytes)

    def write(self, key: str, chunks: Chunks) -> None:
        """Store an object whole, in place of an older one."""
        self.ask("put_object", key, **_body(b"".join(chunks)))

    def create(self, key: str, data: bytes) -> None:
        """Store an object unless the key is taken, which is a FileExistsError."""
        self.ask("put_object", key, IfNoneMatch="*", **_body(data))

    def fetch(
        self, key: str, start: int = 0, length: int | None = None, *, version: str | None = None
    ) -> Piece:
        """Return bytes of an object; without a length, at most the first or next part's worth."""
        if length == 0:
            return Piece(b"", *self.size(key))
        limit = self.parts.part_bytes if length is None else length
        wanted: dict[str, Any] = {} if version is None else {"IfMatch": version}
        whole = start == 0 and length is None
        if whole:
            wanted["ChecksumMode"] = "ENABLED"  # a store knows the checksum of the whole only
        else:
            wanted["Range"] = f"bytes={start}-{start + limit - 1}"
        try:
            answer = self.ask("get_object", key, **wanted)
        except ClientError as error:
            if code_of(error) == "InvalidRange":
                return Piece(b"", *self.size(key))
            raise
        with closing(answer["Body"]) as body:
            if not whole and "ContentRange" not in answer:
                raise OSError("the store sends a whole object where a range was asked for")
            data = _read(body, limit, is_all=answer["ContentLength"] <= limit)
        told = answer.get("ContentRange", "").rpartition("/")[2]
        return Piece(data, int(told or answer["ContentLength"]), answer.get("ETag"))

    def size(self, key: str) -> tuple[int, str | None]:
        """Return the size in bytes, and the etag, of an object."""
        answer = self.ask("head_object", key)
        return int(answer["ContentLength"]), answer.get("ETag")

    def open_read(self, key: str) -> BinaryIO | None:
        """Nothing to open: objects are fetched piece by piece."""
        del key
        return None

    def exists(self, key: str) -> bool:
        """Return whether there is such an object. Failing to ask is an error, not a no."""
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, folder: str, *, deep: bool, after: str | None = None) -> Page:
        """Return a page of what is in a folder."""
        start = self._prefix + (f"{folder}/" if folder else "")
        options = {} if deep else {"Delimiter": "/"}
        options |= {} if after is None else {"ContinuationToken": after}
        answer = self.ask("list_objects_v2", Prefix=start, **options)
        cut = len(self._prefix)
        return Page(
            [
                (item["Key"][cut:], int(item["Size"]))
                for item in answer.get("Contents", ())
                if not item["Key"].endswith("/")  # made by people, to stand for a folder
            ],
            [
                name
                for item in answer.get("CommonPrefixes", ())
                if (name := item["Prefix"].removeprefix(start).rstrip("/"))
            ],
            answer.get("NextContinuationToken") if answer.get("IsTruncated") else None,
        )

    def delete(self, key: str) -> None:
        """Remove an object that may be gone already."""
        with suppress(FileNotFoundError):
            self.ask("delete_object", key)

    def delete_all(self, keys: Names) -> None:
        """Remove objects that may be gone already, a thousand with each request."""
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            some = [{"Key": self._prefix + key} for key in keys[start : start + _DELETE_AT_ONCE]]
            answer = self.ask("delete_objects", Delete={"Objects": some, "Quiet": True})
            for failed in answer.get("Errors", ()):
                if failed.get("Code") != "NoSuchKey":
                    raise ClientError({"Error": failed}, "DeleteObjects")

    def delete_rest(self, folder: str) -> None:
        """Throw away the uploads that dead writers left, as far as we may see them."""
        start = self._prefix + (f"{folder}/" if folder else "")
        try:
            answer = self.ask("list_multipart_uploads", Prefix=start)
        except ClientError as error:
            if code_of(error) in ("AccessDenied", "NotImplemented"):
                return
            raise
        for upload in answer.get("Uploads", ()):
            self.parts.drop(upload["Key"].removeprefix(self._prefix), upload["UploadId"])

    def may_pass(self, error: Exception) -> bool:
        """Return whether the same request may succeed a little later, with new credentials even."""
        if isinstance(error, ClientError):
            if has_expired(error):
                return _accounts.renew()
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return code_of(error) in _PASSING_CODES or status in _PASSING_STATUS
        if isinstance(error, SSLError):  # a certificate does not get better
            return "CERTIFICATE" not in str(error) and "WRONG_VERSION" not in str(error)
        return isinstance(error, _PASSING) or is_transient(error)

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return (what went wrong, what to do), without a secret."""
        return explain_s3(error, _accounts.now(), self._bucket)

    def ask(self, request: str, key: str | None = None, **options: Any) -> dict[str, Any]:
        """Make one request; that there is no such key, or one already, has an error of its own."""
        if key is not None:
            options["Key"] = self._prefix + key
        client = _accounts.now().client
        try:
            answer: dict[str, Any] = getattr(client, request)(Bucket=self._bucket, **options)
        except ClientError as error:
            _raise_plainly(error, conditional="IfNoneMatch" in options)
        return answer


class _S3Parts:
    """Multipart uploads."""

    most_parts = 10_000

    def __init__(self, folder: S3Folder, part_bytes: int) -> None:
        self._folder = folder
        self.part_bytes = part_bytes

    def begin(self, key: str, writer: str) -> str:
        """Begin an upload, remember who does it, and return the upload's id."""
        answer = self._folder.ask(
            "create_multipart_upload", key, Metadata={_WRITER: writer}, ChecksumAlgorithm="CRC32"
        )
        return str(answer["UploadId"])

    def put(self, key: str, upload: str, number: int, data: memoryview) -> Stamp:
        """Store a part, numbered from 1, in place of an earlier try; return its etag and CRC."""
        body = _body(data)
        answer = self._folder.ask("upload_part", key, UploadId=upload, PartNumber=number, **body)
        return str(answer["ETag"]), body["ChecksumCRC32"]

    def finish(self, key: str, upload: str, stamps: list[Stamp]) -> None:
        """Make the object of all parts."""
        parts = [
            {"PartNumber": number, "ETag": etag, "ChecksumCRC32": crc}
            for number, (etag, crc) in enumerate(stamps, start=1)
        ]
        self._folder.ask(
            "complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts}
        )

    def drop(self, key: str, upload: str) -> None:
        """Throw away an upload that may be gone already."""
        with suppress(FileNotFoundError):
            self._folder.ask("abort_multipart_upload", key, UploadId=upload)

    def writer(self, key: str) -> str | None:
        """Return who wrote the object of that key."""
        answer = self._folder.ask("head_object", key)
        writer: str | None = answer.get("Metadata", {}).get(_WRITER)
        return writer


class _Accounts:
    """The account that all folders use, as long as the environment says the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: object = None
        self._account: Account | None = None

    def now(self) -> Account:
        """Return how the store is reached."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        environment = (os.getpid(), os.environ.get("HOME"), variables)
        with self._lock:
            if self._account is None or environment != self._environment:
                self._account = find_account(_CONFIG)
                self._environment = environment
            return self._account

    def renew(self) -> bool:
        """Look for credentials again; return whether there are others now."""
        before = self.now().keys()
        with self._lock:
            self._account = None
        return self.now().keys() != before


_accounts = _Accounts()


class _Body(io.BytesIO):
    """What is sent, to its end or until nobody waits for it any more."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        check_time()
        return super().read(size)


def _body(data: bytes | memoryview) -> dict[str, Any]:
    """Return how a body is sent: with a checksum as a header, which every store can take."""
    crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    body = bytes(data) if len(data) <= _SMALL_BYTES else _Body(data)
    return {"Body": body, "ChecksumAlgorithm": "CRC32", "ChecksumCRC32": crc}


def _read(body: Any, limit: int, *, is_all: bool) -> bytes:
    """Return a body, or the beginning of one longer than ``limit``.

    Read to its end, its length and its checksum are compared.
    """
    data = bytearray()
    while (is_all or len(data) < limit) and (piece := body.read(1 << 20)):
        check_time()
        data += piece
    return bytes(data[:limit])


def _raise_plainly(error: ClientError, *, conditional: bool) -> NoReturn:
    code = code_of(error)
    if code in ("NoSuchKey", "NoSuchUpload"):
        raise FileNotFoundError(code) from error
    if conditional and code == "PreconditionFailed":
        raise FileExistsError(code) from error
    raise error
