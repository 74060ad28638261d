"""Writing text with a trained model: the script on a real run folder, and how bytes are drawn."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from models.gpt import GPT, build
from rayway.checkpoint.share import plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.spec.load import job_to_json, load_job
from rayway.storage.runs import RunFolder
from sample import printable, write_on

JOBS = Path(__file__).parents[2] / "jobs"
SMALL = {"seq_len": 8, "width": 32, "layers": 1, "heads": 2}


def small() -> GPT:
    torch.manual_seed(1)
    return build(**SMALL).eval()


def that_repeats(pattern: bytes) -> GPT:
    """A model that has learnt to write ``pattern`` over and over; its bytes must differ."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    text = torch.tensor([list((pattern * 4)[start : start + 9]) for start in range(len(pattern))])
    for _ in range(100):
        scores = model(text[:, :-1])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    return model


def run_folder(storage: Path, job_file: str, *overrides: str) -> RunFolder:
    resolved = load_job(JOBS / job_file, overrides=overrides)
    at = str(storage / f"{resolved.job.name}-1")
    return RunFolder.create(at, job_to_json(resolved), now=datetime.now(UTC))


def small_run(storage: Path) -> RunFolder:
    overrides = (f"model.args.{name}={value}" for name, value in SMALL.items())
    return run_folder(storage, "stdlib_lm.py", *overrides)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(JOBS / "sample.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_script_prints_what_the_newest_checkpoints_weights_write(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    store = CheckpointStore(folder, attempt=folder.next_attempt({}), is_newest_attempt=lambda: True)
    for step, model in ((9, small()), (10, that_repeats(b"abcd"))):
        state = model.state_dict()
        store.save(step, plan_share({"model": state}), {})
    done = call(folder.run_id, "--storage", str(tmp_path), "--prompt=ab", "--bytes=10")
    assert (done.returncode, done.stdout) == (0, "abcdabcdabcd\n"), done.stderr
    assert done.stderr == f"{folder.run_id}, step 10\n"


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    done = call(folder.url)
    assert (done.returncode, done.stdout) == (5, "")
    assert "has no checkpoint yet. Wait for its first" in done.stderr


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    done = call(run_folder(tmp_path, "digits.py").url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "trained models.resnet:build, but sample.py needs models.gpt:build" in done.stderr


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = call("nothing", "--storage", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("temperature", "different"), [(0.0, 1), (1.0, 3)])
def test_seeds_write_different_texts_unless_the_temperature_is_0(
    temperature: float, different: int
) -> None:
    model, texts = small(), set()
    for seed in (1, 2, 3, 1, 2, 3):
        torch.manual_seed(seed)
        texts.add(write_on(model, b"def", count=8, temperature=temperature))
    assert len(texts) == different


def test_text_ends_where_the_model_ends_a_file() -> None:
    assert write_on(that_repeats(b"xyz\0"), b"x", count=20, temperature=0.0) == b"yz"


def test_without_a_prompt_the_text_begins_as_a_file_does() -> None:
    assert write_on(that_repeats(b"\0xyz"), b"", count=3, temperature=0.0) == b"xyz"


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable(b"a\tb\n\x1b[2J\xff\xc3\xa9") == "a\tb\n\ufffd[2J\ufffd\u00e9"
