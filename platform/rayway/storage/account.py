"""How S3 is reached: whose credentials, which endpoint, which region; and what its answers mean.

botocore finds all three as the AWS command line does: variables, profile, the machine's role.
"""

import re
from dataclasses import dataclass
from typing import Any

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.session import Session, get_session

from rayway.errors import StorageError

_SAME = {
    "NoSuchKey": {"404", "NotFound"},
    "AccessDenied": {"403", "Forbidden"},
    "PreconditionFailed": {"412"},
    "InvalidRange": {"416"},
}
"""What a store calls an answer; without a body, as to HEAD, botocore names the status instead."""

_REGION_CODES = {
    "PermanentRedirect",
    "301",
    "AuthorizationHeaderMalformed",
    "MovedPermanently",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_REPAIRS = {
    "InvalidAccessKeyId": "The store does not know this access key: use another.",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key: copy it again.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "AccessDenied": "Ask for s3:ListBucket and s3:ListBucketMultipartUploads on the bucket, and "
    "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on its keys; or use "
    "other credentials.",
    "NoSuchBucket": "Make the bucket, or check its name and the endpoint.",
    "PreconditionFailed": "Somebody changed it meanwhile: try again.",
    "SlowDown": "The store is overloaded: try again later.",
    "NotImplemented": "This store lacks what rayway needs: see docs/how-to/storage.md.",
    **dict.fromkeys(_EXPIRED, "The credentials have expired: get new ones."),
}
_UNREACHED = "Check that the endpoint is right and answers (AWS_ENDPOINT_URL or the profile)."
_USER_INFO = re.compile(r"//[^/@\s]*@")
_FIXED = {"env", "shared-credentials-file", "config-file"}
"""Credentials that stay the same until somebody changes them."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """How the store is reached. Its text never shows a secret."""

    session: Session
    client: Any
    """botocore's client; threads may share it."""

    endpoint: str | None
    """The store's address; ``None``: AWS."""

    region: str | None
    method: str | None
    """How botocore came by the credentials; ``None``: there are none."""

    source: str
    """The same in words."""

    def __repr__(self) -> str:
        return f"Account({self.endpoint or 'AWS'}, {self.source})"

    def secrets(self) -> list[str]:
        """Return what must not be shown."""
        found = self.session.get_credentials() if self.method in _FIXED else None
        return [] if found is None else [s for s in (found.secret_key, found.token) if s]

    def keys(self) -> object:
        """Return something that is equal only while the credentials are."""
        found = self.session.get_credentials()
        return None if found is None else (found.access_key, found.secret_key, found.token)


def find_account(config: Config) -> Account:
    """Look for credentials, endpoint and region, anew, and make a client.

    Raises:
        StorageError: The AWS profile does not exist, or its files cannot be read.
    """
    try:
        session = get_session()
        session.set_config_variable("metadata_service_num_attempts", 1)
        found = session.get_credentials()
        client = session.create_client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StorageError(
            f"S3 cannot be set up: {error} Check AWS_PROFILE, AWS_ENDPOINT_URL and the AWS files."
        ) from error
    method = found.method if found else None
    url = client.meta.endpoint_url
    return Account(
        session=session,
        client=client,
        endpoint=None if ".amazonaws.com" in url else url,
        region=session.get_config_variable("region"),
        method=method,
        source=_source(method, session.profile or "default"),
    )


def code_of(error: Exception) -> str:
    """Return the store's code, such as ``NoSuchBucket``; empty if it gave no answer at all."""
    if not isinstance(error, ClientError):
        return ""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return next((name for name, others in _SAME.items() if code in others), code)


def has_expired(error: Exception) -> bool:
    """Return whether the store answered that the credentials were good once."""
    return code_of(error) in _EXPIRED


def explain_s3(error: Exception, account: Account, bucket: str) -> tuple[str, str]:
    """Return (what was answered, where, with whose credentials; what to do), without a secret."""
    code = code_of(error)
    if isinstance(error, ClientError):
        answer = error.response.get("Error", {})
        said = f"{code}: {answer.get('Message') or 'no reason given'}"
        said = f"{said.rstrip('.')} ({error.operation_name})"
    else:
        said = " ".join(str(error).split()) or type(error).__name__
    repair = _repair(error, code, bucket)
    at = account.endpoint or f"AWS, region {account.region or 'not set'}"
    text = f"{said.rstrip('.')} (endpoint: {at}; credentials: {account.source})"
    for secret in account.secrets():
        text = text.replace(secret, "***")
    return _USER_INFO.sub("//", text), repair


def _repair(error: Exception, code: str, bucket: str) -> str:
    if code in _REGION_CODES:
        region = _told_region(error)
        where = f"is in region {region}" if region else "is in another region"
        return f"Bucket {bucket!r} {where}: set AWS_REGION={region or 'its region'}."
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
    if isinstance(error, ParamValidationError):
        return "Check the bucket's name in the URL."
    if code or isinstance(error, ClientError):
        return _REPAIRS.get(code, "Ask whoever runs the store, with this code.")
    return _UNREACHED


def _told_region(error: Exception) -> str:
    answer: dict[str, Any] = getattr(error, "response", {})
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or answer.get("Error", {}).get("Region", ""))


def _source(method: str | None, profile: str) -> str:
    if method is None:
        return "none found"
    if method == "env":
        return "the environment (AWS_ACCESS_KEY_ID)"
    if method in ("iam-role", "container-role"):
        return "the machine's role"
    return f"profile {profile!r} ({method})"
