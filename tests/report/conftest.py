"""A run folder, written the way a run writes it."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayway.checkpoint.manifest import Marker
from rayway.storage.runs import MARKER_KEY, RunFolder, attempt_key, checkpoint_folder, events_key
from rayway.telemetry.events import Record, encode

CREATED = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
T0 = CREATED.timestamp()


class RunWriter:
    """Writes one run folder."""

    def __init__(self, url: str) -> None:
        job = {"schema": 1, "job": {"name": "digits", "optim": {"steps": 100}}}
        self.folder = RunFolder.create(url, json.dumps(job), now=CREATED)

    def attempt(self, records: Sequence[Record], end: Record | None = None) -> int:
        number = self.folder.next_attempt({})
        log = b"".join(encode(record, t=T0 + i) for i, record in enumerate(records))
        if log:
            self.folder.objects.append(events_key(number, 0), log)
        if end is not None:
            self.folder.write(attempt_key(number, "end.json"), end)
        return number

    def alive(self, attempt: int, sign: Record) -> None:
        self.folder.write(attempt_key(attempt, "alive.json"), sign)

    def checkpoint(self, number: int, attempt: int = 1) -> None:
        marker = Marker(
            step=number,
            attempt=attempt,
            manifest_sha256="00" * 32,
            total_bytes=1000,
            weights_sha256="ab" * 32,
            committed_at=T0 + 2,
            writer="test",
        )
        key = f"{checkpoint_folder(number, attempt)}/{MARKER_KEY}"
        self.folder.checkpoints.put(key, marker.to_json())


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., RunWriter]:
    return lambda run_id="digits-1": RunWriter(str(tmp_path / run_id))
