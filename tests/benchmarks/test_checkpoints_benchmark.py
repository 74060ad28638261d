"""The benchmark of checkpoints runs small, and prints what it claims to measure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoints.py"
WAYS = {"rayway", "torch_save", "dcp", "dcp_async"}


@pytest.mark.slow
def test_every_way_is_measured_beside_its_limits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--at", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["benchmark"] == "checkpoints"
    for ratio in ("blocked_per_memcpy", "lost_per_torch_save", "durable_per_raw_write"):
        assert found[ratio].keys() == WAYS
        assert found["goals"][ratio]
    assert found["rayway"]["restore_s"]["median"] > 0
    assert found["bytes_per_state"]["rayway"] < 1.2  # of a state of 500 kB
    assert list(tmp_path.iterdir()) == []
