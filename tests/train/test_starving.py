"""Waiting for data is said, with the stage that it is for."""

from dataclasses import replace

import pytest
import torch

from rayway.data.feed import Waits
from rayway.train.starving import DataWatch, slowest_stage, waits_record
from rayway.train.step import StepReport

REPORT = StepReport(step=1, totals=torch.zeros(4), grad_norm=None, lr=0.1)
NONE = Waits(
    wait_s=0.0,
    read_s=0.0,
    decode_s=0.0,
    transform_s=0.0,
    transfer_s=0.0,
    gather_s=0.0,
    skipped_rows=0,
)


class Run:
    """A training whose clock and feed the test turns by hand."""

    def __init__(self) -> None:
        self.waits, self.seconds, self.said = NONE, 0.0, list[str]()
        self.watch = DataWatch(lambda: self.waits, self.said.append, now=lambda: self.seconds)

    def steps(self, seconds: float, *, waiting: float = 0.0, **stages: float) -> None:
        for _ in range(100):
            self.seconds += seconds / 100
            self.waits = replace(
                self.waits,
                wait_s=self.waits.wait_s + waiting * seconds / 100,
                **{name: getattr(self.waits, name) + s / 100 for name, s in stages.items()},
            )
            self.watch.on_step(REPORT, [])


def test_a_training_that_hardly_waits_is_not_bothered() -> None:
    run = Run()
    run.steps(60, waiting=0.09, read_s=30)
    assert run.said == []


def test_the_first_batch_is_waited_for_without_a_word() -> None:
    run = Run()
    run.waits, run.seconds = replace(NONE, wait_s=50.0), 50.0
    run.steps(60)
    assert run.said == []


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("read_s", "reading from storage"),
        ("decode_s", "decoding Parquet"),
        ("transform_s", "data.transform"),
        ("transfer_s", "moving blocks"),
        ("gather_s", "gathering rows"),
    ],
)
def test_the_slowest_stage_is_named_once_with_what_to_do(stage: str, words: str) -> None:
    run = Run()
    run.steps(60, waiting=0.4, **{"read_s": 1.0, "decode_s": 1.0, stage: 20.0})
    assert len(run.said) == 1
    assert "waits for data 40 % of the time" in run.said[0]
    assert words in run.said[0]
    assert slowest_stage(run.waits)[0] in run.said[0]


def test_another_stage_is_named_when_it_becomes_the_slowest() -> None:
    run = Run()
    run.steps(30, waiting=0.4, read_s=20.0)
    run.steps(30, waiting=0.4, transform_s=50.0)
    assert len(run.said) == 2


def test_a_rank_that_does_not_write_says_nothing() -> None:
    run = Run()
    run.watch = DataWatch(lambda: run.waits, None, now=lambda: run.seconds)
    run.steps(60, waiting=0.9, read_s=30)


def test_the_record_holds_each_stage_and_the_slowest() -> None:
    record = waits_record(replace(NONE, wait_s=2.0, decode_s=3.0))
    assert (record["wait_s"], record["decode_s"]) == (2.0, 3.0)
    assert record["slowest"] == "decoding Parquet"
