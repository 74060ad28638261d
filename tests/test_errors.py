import pytest

from rayway.errors import (
    CheckpointError,
    ClusterError,
    DataError,
    LostError,
    RaywayError,
    SpecError,
    StoppedError,
    StorageError,
    TrainingError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError, 2),
        (DataError, 2),
        (ClusterError, 3),
        (LostError, 3),
        (TrainingError, 4),
        (StorageError, 5),
        (CheckpointError, 5),
        (StoppedError, 130),
    ],
)
def test_each_error_carries_the_documented_exit_code(error: type[RaywayError], code: int) -> None:
    assert error.exit_code == code
    assert issubclass(error, RaywayError)


def test_a_damaged_checkpoint_is_storage_trouble() -> None:
    assert issubclass(CheckpointError, StorageError)


def test_the_message_is_printed_as_it_is() -> None:
    assert str(SpecError("optim.lr=0: use more.")) == "optim.lr=0: use more."
