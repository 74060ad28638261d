"""What an error of a file system means, where no more is known than its class and number."""

import errno
import re

_REPAIRS = {
    errno.ENOSPC: "Free some space, then start again; what was committed is untouched.",
    errno.EDQUOT: "Free some of the quota, then start again; what was committed is untouched.",
    errno.EACCES: "Check who may write there, and the credentials.",
    errno.EPERM: "Check who may write there, and the credentials.",
    errno.EROFS: "The file system is read-only: choose another storage.",
    errno.ENOTDIR: "A file stands where a folder is needed: move it or choose another storage.",
}
_REPAIR = "Check that the storage is reachable and its address is right."
_USER_INFO = re.compile(r"//[^/@\s]*@")

# An answer that will not change by asking again.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
# Network failures that client libraries do not derive from OSError, by class name: naming them
# saves us from importing those libraries for storage that needs none.
_NETWORK = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "ServerTimeoutError"}


def is_transient(error: Exception) -> bool:
    """Return whether the same call may succeed a little later."""
    if isinstance(error, _FINAL):
        return False
    return isinstance(error, OSError) or any(
        parent.__name__ in _NETWORK for parent in type(error).__mro__
    )


def explain(error: Exception) -> tuple[str, str]:
    """Return (what went wrong, what to do), without a secret."""
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    name = type(error).__name__
    repair = _REPAIRS.get(getattr(error, "errno", None) or 0, _REPAIR)
    return f"{without_user(cause) or name} ({name})", repair


def without_user(text: str) -> str:
    """Return text without the user names and passwords of the URLs in it."""
    return _USER_INFO.sub("//", text)
