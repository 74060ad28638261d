"""What can go wrong, by who has to act; each class carries the command's exit code.

A message says what was asked, what was found and what to do. The command line prints it as it is,
without a traceback.
"""

from typing import ClassVar


class RaywayError(Exception):
    """The root of all errors that rayway raises on purpose."""

    exit_code: ClassVar[int] = 4


class SpecError(RaywayError):
    """The job, a setting or a command-line value is wrong. The user changes it."""

    exit_code: ClassVar[int] = 2


class DataError(RaywayError):
    """The data is missing, empty, unreadable, or not what it was. The user mends it."""

    exit_code: ClassVar[int] = 2


class ClusterError(RaywayError):
    """No cluster answers, or it has too little for the job."""

    exit_code: ClassVar[int] = 3


class TrainingError(RaywayError):
    """Training ended before its last step; the run folder says why."""

    exit_code: ClassVar[int] = 4


class LostError(RaywayError):
    """A process or node that the run needs went away; another attempt may do better."""

    exit_code: ClassVar[int] = 3


class StorageError(RaywayError):
    """The run folder cannot be written or read."""

    exit_code: ClassVar[int] = 5


class CheckpointError(StorageError):
    """A checkpoint is damaged, or no checkpoint that a resume needs is left."""


class StoppedError(RaywayError):
    """The run was asked to stop; its last checkpoint is committed."""

    exit_code: ClassVar[int] = 130
