import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rayway.checkpoint import catalog
from rayway.checkpoint.share import plan_share
from rayway.errors import CheckpointError


def test_committed_checkpoints_are_listed_by_number(run, begin, state) -> None:
    store = begin(run)
    for step in [9, 10, 99, 100, 1000, 10**8]:
        saved = store.save(step, plan_share(state(step)), {})
        assert catalog.committed(run)[-1] == saved
    assert [entry.step for entry in catalog.committed(run)] == [9, 10, 99, 100, 1000, 10**8]


def test_other_things_among_the_checkpoints_are_passed_over(run, begin, state) -> None:
    begin(run).save(5, plan_share(state(5)), {})
    run.checkpoints.put("step-5/COMMITTED", b"")
    run.checkpoints.put("notes/readme", b"")
    run.checkpoints.put("step-00000009.attempt-001", b"a file")
    assert [found.step for found in catalog.find(run)] == [5]


def test_a_sound_checkpoint_verifies_and_tells_its_manifest(run, begin, state) -> None:
    saved = begin(run).save(5, plan_share(state(5)), {"lr": 0.5})
    [found] = catalog.find(run)
    manifest = catalog.verify(run, found)
    assert (manifest.step, manifest.facts, manifest.total_bytes) == (5, {"lr": 0.5}, saved.bytes)


def test_a_changed_byte_fails_verification(run, begin, state) -> None:
    begin(run).save(5, plan_share(state(5)), {})
    [found] = catalog.find(run)
    key = f"{found.folder}/rank-00000.optimizer-0.safetensors"
    data = bytearray(run.checkpoints.get(key))
    data[-1] ^= 1
    run.checkpoints.put(key, bytes(data))
    with pytest.raises(CheckpointError, match=r"optimizer-0\.safetensors has SHA-256"):
        catalog.verify(run, found)


def test_a_copied_run_folder_verifies_in_its_new_place(tmp_path, new_run, begin, state) -> None:
    run = new_run(str(tmp_path / "a-1"))
    begin(run).save(5, plan_share(state(5)), {})
    shutil.copytree(tmp_path / "a-1", tmp_path / "moved" / "elsewhere")
    shutil.rmtree(tmp_path / "a-1")
    copy = type(run).open(str(tmp_path / "moved" / "elsewhere"))
    [found] = catalog.find(copy)
    assert catalog.verify(copy, found).step == 5
    stored = b"".join(path.read_bytes() for path in Path(copy.url).rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in stored


def test_listing_and_verifying_do_not_load_torch() -> None:
    code = "import rayway.checkpoint.catalog, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
