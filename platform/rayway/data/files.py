"""Where shards lie: from a URL to a filesystem, and the footer of one Parquet file.

Footers are fetched as raw bytes: their hash names the content of a shard (a footer holds sizes,
offsets and statistics of all columns), and a file cut off is found before anything is parsed.
"""

import os

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs

from rayway.errors import DataError

_TAIL_BYTES = 64 << 10
_MAGIC = b"PAR1"
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # Arrow itself reads neither


def filesystem_for(url: str) -> tuple[pafs.FileSystem, str]:
    """Return the filesystem of ``url`` and the path of ``url`` on it.

    Local paths, ``file://`` and ``s3://`` are Arrow's own; every other scheme goes through fsspec.
    Credentials, region and endpoint of S3 come from the usual AWS variables and files.

    Raises:
        DataError: No filesystem knows the scheme, or it cannot be set up.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        return pafs.LocalFileSystem(), os.path.abspath(url)
    if scheme == "file":
        return pafs.LocalFileSystem(), os.path.abspath(rest)
    try:
        if scheme == "s3":
            return _s3(rest.partition("/")[0]), rest.rstrip("/")
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(f"{url} cannot be opened: {error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path.rstrip("/")


def _s3(bucket: str) -> pafs.S3FileSystem:
    endpoint = next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")
    scheme, _, host = endpoint.rpartition("://")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = pafs.resolve_s3_region(bucket)
    return pafs.S3FileSystem(
        region=region,
        endpoint_override=host or None,
        scheme=scheme or "https",
        connect_timeout=5,
        request_timeout=20,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=3),
    )


def read_footer(filesystem: pafs.FileSystem, path: str, size_bytes: int) -> bytes:
    """Return the footer of a Parquet file, with its length and magic, as the file ends.

    Raises:
        DataError: The file is empty, cut off, or not Parquet; it is named.
    """
    if size_bytes == 0:
        raise DataError(f"{path} is empty (0 bytes). Write it again or delete it.")
    try:
        with filesystem.open_input_file(path) as file:
            tail = file.read_at(min(size_bytes, _TAIL_BYTES), max(size_bytes - _TAIL_BYTES, 0))
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if not tail.endswith(_MAGIC) or length + len(_MAGIC) > size_bytes:
                raise DataError(
                    f"{path} ({size_bytes} bytes) does not end as a Parquet file: it was cut off "
                    f"or is something else. Write it again or delete it."
                )
            if length > len(tail):
                tail = file.read_at(length, size_bytes - length)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return bytes(tail[-length:])
