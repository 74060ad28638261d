"""S3 as users set it up: by the AWS variables, a profile, or the machine's role.

botocore finds credentials, region and endpoint as the AWS command line does, lists a bucket and
says what is wrong with a request; Arrow reads. All waits have an end: a store that accepts and
never answers is an error after 25 seconds while listing and after 45 while reading.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import botocore
import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session, get_session

from rayway.errors import DataError

_CONNECT_S = 5
_LIST_S, _LIST_ATTEMPTS = 10, 2
_READ_S, _READ_ATTEMPTS = 10, 4
_FIXED = {"env", "shared-credentials-file", "config-file"}
"""Credentials that are the same until the process ends."""
_ARROWS_OWN = {"iam-role", "container-role", "assume-role-with-web-identity", "custom-process"}
"""Credentials that Arrow finds and renews by itself."""
_ARROW_ERROR = re.compile(
    r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during (\w+) operation: (.*)"
)
_REPAIRS = {
    "InvalidAccessKeyId": "The store does not know this access key: use another.",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key: copy it again.",
    "ExpiredToken": "The credentials have expired: get new ones.",
    "AccessDenied": "Ask for s3:ListBucket on the bucket and s3:GetObject on the keys, or use "
    "other credentials.",
    "NoSuchBucket": "Check the name of the bucket and the endpoint.",
    "NoSuchKey": "It is gone: put it back.",
    "SlowDown": "The store is overloaded: try again later.",
    "ServiceUnavailable": "The store is overloaded or out of order: try again later.",
    "InternalError": "The store is out of order: try again later.",
}
_SAME = {
    "NoSuchKey": {"404", "NotFound", "ResourceNotFound"},
    "AccessDenied": {"403", "Forbidden"},
    "ServiceUnavailable": {"503"},
    "InternalError": {"500", "InternalFailure"},
}
_REGION_CODES = {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "MovedPermanently"}


@dataclass(frozen=True, kw_only=True)
class _Account:
    """How the store is reached. Its text never shows a secret."""

    session: Session
    endpoint: str | None
    region: str | None
    method: str | None
    source: str


def s3_filesystem(bucket: str) -> pafs.FileSystem:
    """Return the filesystem to read ``bucket`` with; its paths begin with the bucket.

    Raises:
        DataError: The AWS profile does not exist or its files cannot be read.
    """
    account = _account()
    credentials: dict[str, Any] = {}
    if account.method is None:
        credentials = {"anonymous": True}
    elif account.method in _FIXED:
        keys = account.session.get_credentials().get_frozen_credentials()
        credentials = {
            "access_key": keys.access_key,
            "secret_key": keys.secret_key,
            "session_token": keys.token,
        }
    elif account.method not in _ARROWS_OWN:  # single sign-on and the like: s3fs renews them
        handler = fsspec.filesystem("s3", endpoint_url=account.endpoint)
        return pafs.PyFileSystem(pafs.FSSpecHandler(handler))
    scheme, _, host = (account.endpoint or "").rpartition("://")
    return pafs.S3FileSystem(
        **credentials,
        region=account.region if account.endpoint else _region_of(bucket, account.region),
        endpoint_override=host or None,
        scheme=scheme or "https",
        connect_timeout=_CONNECT_S,
        request_timeout=_READ_S,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_READ_ATTEMPTS),
    )


def list_s3(bucket: str, prefix: str) -> Iterator[tuple[str, int, str]]:
    """Yield (key, size in bytes, etag) of each object whose key begins with ``prefix``.

    Raises:
        DataError: The bucket cannot be listed; with the store's reason.
    """
    account = _account()
    signature = {} if account.method else {"signature_version": botocore.UNSIGNED}
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_LIST_S,
        retries={"total_max_attempts": _LIST_ATTEMPTS, "mode": "standard"},
        **signature,
    )
    try:
        client = account.session.create_client("s3", config=config)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                yield item["Key"], item["Size"], item.get("ETag", "").strip('"')
    except (BotoCoreError, ClientError) as error:
        url = f"s3://{bucket}/{prefix}"
        raise DataError(f"{url} cannot be listed: {explain_s3(error, url)}") from None


def explain_s3(error: Exception, url: str) -> str:
    """Return what the store answered for ``url``, where it is and whose credentials were used.

    An error that is not the store's is told as it is.

    The words have no secret in them, whatever the error holds.
    """
    account = _account()
    ours = isinstance(error, BotoCoreError | ClientError | FileNotFoundError)
    if not ours and not _ARROW_ERROR.search(str(error)):  # e.g. damage: the store did its part
        return _without_secrets(str(error) or repr(error), account)
    bucket = url.removeprefix("s3://").partition("/")[0]
    code, said, region = _told(error)
    at = account.endpoint or f"AWS, region {account.region or 'not set'}"
    text = f"{code}: {said}" if code else said
    repair = _REPAIRS.get(code, "")
    if code in _REGION_CODES:
        where = f"is in region {region}" if region else "is in another region"
        repair = f"Bucket {bucket!r} {where}: set AWS_REGION={region or 'its region'}."
    elif not code:
        repair = "Check that the endpoint is right and answers (AWS_ENDPOINT_URL or the profile)."
    elif account.method is None and code == "AccessDenied":
        repair = "Set credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
    text = f"{text.rstrip('.')} (endpoint: {at}; credentials: {account.source}). {repair}"
    return _without_secrets(text.rstrip(), account)


def _told(error: Exception) -> tuple[str, str, str]:
    """Return the S3 code, the words and the bucket's region, as far as the error has them."""
    if isinstance(error, ClientError):
        answer = error.response.get("Error", {})
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region") or answer.get("Region", "")
        return _code(str(answer.get("Code", ""))), answer.get("Message", "no reason given"), region
    if isinstance(error, FileNotFoundError):
        return "NoSuchKey", "there is no such object", ""
    found = _ARROW_ERROR.search(str(error))
    if found is None:
        return "", str(error), ""
    arrow, status, operation, words = found.groups()
    code = _code("".join(word.title() for word in arrow.split("_")))
    if code in ("NetworkConnection", "Unknown"):
        code = _code(status or "")
    words = words.split("; Details: ")[-1].strip().rstrip(".") or "no reason given"
    return code, f"{words} ({operation}{f', HTTP {status}' if status else ''})", ""


def _code(code: str) -> str:
    return next((name for name, others in _SAME.items() if code in others), code)


def _account() -> _Account:
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return _account_of(tuple(sorted(variables.items())), os.environ.get("HOME"))


@lru_cache(maxsize=2)  # off AWS, finding that there are no credentials takes a second
def _account_of(_variables: tuple[tuple[str, str], ...], _home: str | None) -> _Account:
    try:
        session = get_session()
        session.set_config_variable("metadata_service_num_attempts", 1)
        found = session.get_credentials()
        client = session.create_client("s3")
    except (BotoCoreError, ValueError) as error:
        raise DataError(
            f"S3 cannot be set up: {error} Check AWS_PROFILE, AWS_ENDPOINT_URL and the AWS files."
        ) from error
    url = client.meta.endpoint_url
    method = found.method if found else None
    return _Account(
        session=session,
        endpoint=None if ".amazonaws.com" in url else url,
        region=session.get_config_variable("region"),
        method=method,
        source=_source(method, session.profile or "default"),
    )


def _source(method: str | None, profile: str) -> str:
    if method is None:
        return "none found, so asked as anyone"
    if method == "env":
        return "the environment (AWS_ACCESS_KEY_ID)"
    if method in ("iam-role", "container-role"):
        return "the machine's role"
    return f"profile {profile!r} ({method})"


def _region_of(bucket: str, otherwise: str | None) -> str | None:
    """Return where AWS keeps the bucket: users need not know, and reading elsewhere fails."""
    try:
        return str(pafs.resolve_s3_region(bucket))
    except (OSError, pa.ArrowException):
        return otherwise


def _without_secrets(text: str, account: _Account) -> str:
    keys = account.session.get_credentials() if account.method in _FIXED else None
    for secret in () if keys is None else (keys.secret_key, keys.token, keys.access_key):
        if secret:
            text = text.replace(secret, "***")
    return text
