"""What a run folder says."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from rayway.errors import StorageError
from rayway.report.facts import read_run, steps_merged, to_strict_json
from rayway.storage.runs import attempt_key, events_key
from rayway.telemetry.alive import sign_of_life
from rayway.telemetry.events import Record

WriteRun = Callable[..., Any]
EVALUATED = {"type": "evaluate", "step": 2, "metrics": {"accuracy": 0.9, "val_loss": math.nan}}


def start(from_step: int = 0, **more: Any) -> Record:
    return {"type": "start", "from_step": from_step, "world_size": 2, "device": "cpu", **more}


def step(number: int, loss: float = 0.5, **more: Any) -> Record:
    numbers = {"loss": loss, "lr": 0.1, "grad_norm": 1.0, "rows": 8}
    return {"type": "step", "step": number, **numbers, **more}


def steps(first: int, last: int) -> list[Record]:
    return [step(number) for number in range(first, last + 1)]


def test_a_run_that_crashed_once_and_finished(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), *steps(1, 3), {"type": "warning", "message": "slow disk"}])
    run.checkpoint(2)
    evaluated = {"type": "evaluate", "step": 4, "metrics": {"accuracy": 0.8}}
    end = {"state": "FINISHED", "step": 4, "clock": {"step_s": 3.0}, "weights_sha256": "cd" * 32}
    run.attempt([start(2), *steps(3, 4), EVALUATED | {"step": 3}, evaluated], end)
    run.checkpoint(4, 2)

    facts = read_run(run.folder)

    assert (facts.run_id, facts.name, facts.state, facts.reason) == (
        "digits-1",
        "digits",
        "FINISHED",
        None,
    )
    assert (facts.step, facts.steps, facts.attempts) == (4, 100, 2)
    assert [each["from_step"] for each in facts.starts] == [0, 2]
    assert (facts.loss, facts.metrics) == (0.5, {"accuracy": 0.8})
    assert (facts.best["accuracy"].value, facts.best["accuracy"].step) == (0.9, 3)
    assert [checkpoint.step for checkpoint in facts.checkpoints] == [2, 4]
    assert facts.weights_sha256 == "cd" * 32
    assert facts.clock == {"step_s": 3.0}
    assert facts.warnings == ["slow disk"]


def test_the_json_has_the_promised_keys_and_is_strict(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), *steps(1, 2), step(3, math.nan), EVALUATED])
    run.checkpoint(2)
    text = read_run(run.folder).to_json()
    facts = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    promised = {"run_id", "state", "reason", "step", "steps", "attempts", "metrics", "checkpoints"}
    assert promised | {"weights_sha256"} <= facts.keys()
    assert {"step", "committed_at", "bytes"} <= facts["checkpoints"][0].keys()
    assert facts["metrics"] == {"accuracy": 0.9, "val_loss": None}
    assert facts["loss"] is None


def test_a_living_run_is_running_and_a_silent_one_interrupted(write_run: WriteRun) -> None:
    run = write_run()
    number = run.attempt([start(), *steps(1, 2)])
    sign = sign_of_life()
    run.alive(number, sign)
    assert read_run(run.folder).state == "RUNNING"
    assert read_run(run.folder, whole=False).state == "RUNNING"
    assert read_run(run.folder, now=sign["t"] + 60).state == "INTERRUPTED"
    run.alive(number, sign | {"pid_since": 1.0})  # the number is another process's now
    assert read_run(run.folder).state == "INTERRUPTED"


def test_before_the_first_heartbeat_the_attempt_itself_is_the_sign(write_run: WriteRun) -> None:
    run = write_run()
    sign = sign_of_life()
    run.folder.next_attempt({"started_at": sign["t"], "host": "far"})
    assert read_run(run.folder, now=sign["t"] + 5).state == "RUNNING"
    assert read_run(run.folder, now=sign["t"] + 60).state == "INTERRUPTED"


def test_a_failed_run_has_done_the_steps_after_its_last_checkpoint(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), *steps(1, 9)], {"state": "FAILED", "step": 5, "reason": "x"})
    facts = read_run(run.folder)
    assert (facts.state, facts.step) == ("FAILED", 9)


def test_an_older_attempts_end_is_not_the_runs(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), *steps(1, 2)], {"state": "FAILED", "step": 2, "reason": "user code"})
    run.alive(run.attempt([start(1)]), sign_of_life())
    facts = read_run(run.folder)
    assert (facts.state, facts.step) == ("RUNNING", 1)


def test_a_run_without_an_attempt(write_run: WriteRun) -> None:
    facts = read_run(write_run().folder)
    assert (facts.state, facts.step, facts.attempts) == ("INTERRUPTED", 0, 0)


def test_a_short_look_agrees_with_a_whole_one(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(steps=5000), *steps(1, 2000), EVALUATED | {"step": 2000}])
    assert len(run.folder.objects.get(events_key(1, 0))) > 128_000
    whole, short = read_run(run.folder), read_run(run.folder, whole=False)
    assert (short.state, short.step, short.loss) == (whole.state, whole.step, whole.loss)
    assert (short.steps, short.metrics["accuracy"]) == (5000, 0.9)
    assert short.warnings == []


def test_a_torn_last_line_is_fine_and_a_damaged_middle_one_is_told(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), step(1)])
    run.folder.objects.append(events_key(1, 0), b'{"type":"st')
    assert read_run(run.folder).warnings == []
    run.folder.objects.append(events_key(1, 0), b"\n")
    assert read_run(run.folder).warnings == ["The log of attempt 1 is damaged in line 3."]


def test_only_committed_checkpoints_count_in_the_order_of_steps(write_run: WriteRun) -> None:
    run = write_run()
    for number, attempt in [(900, 2), (1000, 1), (900, 1)]:
        run.checkpoint(number, attempt)
    run.folder.checkpoints.put("step-00002000.attempt-001/model.safetensors", b"half of it")
    found = read_run(run.folder).checkpoints
    assert [(each.step, each.attempt) for each in found] == [(900, 1), (900, 2), (1000, 1)]


def test_the_checkpoint_tells_the_weights_if_the_end_did_not(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), *steps(1, 2)])
    run.checkpoint(2)
    assert read_run(run.folder).weights_sha256 == "ab" * 32


def test_a_damaged_record_is_refused(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start()])
    run.folder.objects.put(attempt_key(1, "end.json"), b"{")
    with pytest.raises(StorageError, match=r"end\.json is not valid JSON"):
        read_run(run.folder)


def test_a_job_that_this_version_does_not_know_can_be_looked_at(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), step(1)])
    run.folder.objects.put("job.json", b"[]")
    facts = read_run(run.folder)
    assert (facts.name, facts.steps, facts.step) == (None, None, 1)


def test_steps_of_all_attempts_are_merged(write_run: WriteRun) -> None:
    run = write_run()
    run.attempt([start(), step(1, 1.0), step(2, 1.0), step(3, math.nan)])
    run.attempt([start(1), step(2, 2.0, ids=[5, 6])])
    run.folder.next_attempt({})
    merged = steps_merged(run.folder)
    assert [(r["step"], r["loss"], r["attempt"]) for r in merged] == [(1, 1.0, 1), (2, 2.0, 2)]
    assert merged[1]["ids"] == [5, 6]


@pytest.mark.parametrize(
    ("value", "text"), [([1.5, "a"], '[1.5, "a"]'), ([math.nan, math.inf], "[null, null]")]
)
def test_json_is_strict(value: Any, text: str) -> None:
    assert to_strict_json(value) == text
