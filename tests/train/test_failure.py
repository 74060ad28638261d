"""What is kept of an exception: a refusal, the user's own, or the echo of another rank's end."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks

from rayway.errors import CheckpointError, LostError, SpecError, TrainingError
from rayway.train.failure import RankError, describe_failure
from rayway.train.ranks import sum_over_ranks


def raised(error: BaseException) -> BaseException:
    """Return the exception as one that this file raised."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - handed on
        return caught


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(SpecError("no"), 2), (TrainingError("no"), 4), (CheckpointError("no"), 5)],
)
def test_a_refusal_keeps_its_text_and_exit_code(error: Exception, exit_code: int) -> None:
    found = describe_failure(raised(error), rank=1, step=7)
    assert (found.kind, found.message, found.exit_code) == ("refused", "no", exit_code)
    assert (found.rank, found.step, found.error) == (1, 7, type(error).__name__)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("label"),
        RuntimeError("the feature store is empty"),
        RuntimeError("cannot restore the socket of my own database"),
        ConnectionResetError("connection reset by my own database"),
        MemoryError(),
    ],
)
def test_the_users_own_exception_is_shown_with_the_users_frames(error: Exception) -> None:
    found = describe_failure(raised(error), rank=0, step=0)
    assert found.kind == "user"
    assert found.exit_code == 4
    assert found.message.startswith("Traceback")
    assert "in raised\n" in found.message
    assert found.message.endswith(type(error).__name__) or type(error).__name__ in found.message


def left_alone() -> dict[str, Any] | None:
    """Rank 1 dies; say what rank 0 makes of it."""
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        sum_over_ranks(torch.ones(3))
    except RuntimeError as error:
        return describe_failure(error, rank=0, step=3).record()
    return None


def test_the_end_of_another_rank_is_told_from_the_users_own_errors(tmp_path: Path) -> None:
    pool = Ranks(tmp_path)
    try:
        found, _ = pool.run(left_alone, world_size=2, dies=1)
    finally:
        pool.close()
    assert (found["kind"], found["step"]) == ("peer", 3)
    assert found["message"].startswith("another rank went away: ")


def test_the_record_comes_back_from_json() -> None:
    found = describe_failure(raised(ValueError("x")), rank=2, step=5)
    assert RankError(**json.loads(json.dumps(found.record()))) == found


def test_a_process_that_the_rank_needs_and_lost_is_no_refusal() -> None:
    found = describe_failure(raised(LostError("the router died")), rank=1, step=4)
    assert (found.kind, found.message) == ("peer", "the router died")
