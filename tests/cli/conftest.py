"""Storage with two runs, and a way to ask the commands about it."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from rayway.checkpoint.manifest import Marker
from rayway.storage.runs import MARKER_KEY, RunFolder, attempt_key, checkpoint_folder, events_key
from rayway.telemetry.alive import sign_of_life
from rayway.telemetry.events import EventLog

FINISHED, RUNNING = "digits-20260131-120000-aaaa", "digits-20260131-130000-bbbb"


def _begin(storage: Path, run_id: str, hour: int) -> RunFolder:
    job = json.dumps({"schema": 1, "job": {"name": "digits", "optim": {"steps": 3}}})
    now = datetime(2026, 1, 31, hour, tzinfo=UTC)
    return RunFolder.create(str(storage / run_id), job, now=now)


def _train(folder: RunFolder, first: int, last: int, loss: float) -> int:
    attempt = folder.next_attempt(sign_of_life())
    key = events_key(attempt, 0)
    with EventLog(lambda data: folder.objects.append(key, data)) as log:
        log.append({"type": "start", "attempt": attempt, "from_step": first - 1, "world_size": 2})
        for step in range(first, last + 1):
            numbers = {"loss": loss, "lr": 0.1, "grad_norm": 1.0, "rows": 8, "ids": [step]}
            log.append({"type": "step", "step": step, **numbers})
    return attempt


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A finished run of two attempts, with a NaN loss in step 3; and one that goes on."""
    finished = _begin(tmp_path, FINISHED, 12)
    _train(finished, 1, 3, 0.5)
    marker = Marker(
        step=2,
        attempt=1,
        manifest_sha256="00" * 32,
        total_bytes=1000,
        weights_sha256="ab" * 32,
        committed_at=5.0,
        writer="test",
    )
    finished.checkpoints.put(f"{checkpoint_folder(2, 1)}/{MARKER_KEY}", marker.to_json())
    attempt = _train(finished, 3, 3, float("nan"))
    finished.write(attempt_key(attempt, "end.json"), {"state": "FINISHED", "step": 3})
    _train(_begin(tmp_path, RUNNING, 13), 1, 2, 0.25)
    return tmp_path


@pytest.fixture
def ask(storage: Path) -> Callable[..., Result]:
    """Call a command as a shell would, with the storage above."""

    def call(command: click.Command, *arguments: str) -> Result:
        asked = [*arguments, "--storage", str(storage)]
        return CliRunner().invoke(command, asked, catch_exceptions=True)

    return call
