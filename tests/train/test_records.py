"""Each step becomes an event; numbers that are not finite end the run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Ranks

from rayway.data.feed import MicroBatch
from rayway.train.records import NumericsError, StepRecords, gather_ids
from rayway.train.step import StepReport


def report_of(
    step: int,
    loss_sum: float = 6.0,
    weight: float = 4.0,
    grad_norm: float = 0.5,
    rows: int | None = None,
) -> StepReport:
    used = 99 + step if rows is None else rows
    totals = torch.tensor([loss_sum, weight, 0.0, used], dtype=torch.float64)
    return StepReport(step=step, totals=totals, grad_norm=torch.tensor(grad_norm), lr=0.1)


def micro_batches(*ids: list[int]) -> list[MicroBatch]:
    x = {"x": torch.zeros(1)}
    return [MicroBatch(x, np.array(each, dtype=np.int64), len(each), 0) for each in ids]


def records_of(*reports: StepReport, **options: Any) -> list[Mapping[str, Any]]:
    written: list[Mapping[str, Any]] = []
    options = {"rows_in_step": lambda step: 100 + step, "trace_slots": None, **options}
    records = StepRecords(written.append, **options)
    for report in reports:
        records.on_step(report, micro_batches([4, 2], [9]))
    records.settle()
    return written


def test_a_step_is_written_with_its_numbers() -> None:
    expected = {"type": "step", "step": 7, "loss": 1.5, "lr": 0.1, "grad_norm": 0.5, "rows": 106}
    assert records_of(report_of(7)) == [expected]


def test_rows_that_were_left_out_are_counted_and_told_of_once() -> None:
    written = records_of(report_of(1, rows=97), report_of(2), report_of(3, rows=100))
    warning, *steps = written
    assert "step 1: 3 of 100 rows have invalid values" in warning["message"]
    assert [step["rows"] for step in steps] == [97, 101, 100]
    records = StepRecords(lambda _: None, rows_in_step=lambda step: 100 + step, trace_slots=None)
    records.on_step(report_of(1, rows=97), [])
    records.on_step(report_of(3, rows=100), [])
    assert records.left_out == 5


def test_every_step_is_written_once_and_in_order() -> None:
    written = records_of(*map(report_of, range(1, 30)))
    assert [record["step"] for record in written] == list(range(1, 30))


def test_on_the_cpu_nothing_waits() -> None:
    written: list[Mapping[str, Any]] = []
    records = StepRecords(written.append, rows_in_step=lambda step: 8, trace_slots=None)
    records.on_step(report_of(1), micro_batches([1]))
    assert len(written) == 1


def test_a_batch_without_weight_is_named_as_the_cause() -> None:
    with pytest.raises(NumericsError, match=r"step 2: the weight of the whole global batch is 0"):
        records_of(report_of(2, weight=0.0))


@pytest.mark.parametrize(
    "numbers",
    [
        {"loss_sum": float("nan")},
        {"loss_sum": float("inf")},
        {"grad_norm": float("nan")},
        {"grad_norm": float("inf")},
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_numbers_that_are_not_finite_end_the_run_on_every_rank(
    numbers: dict[str, float], writes: bool
) -> None:
    written: list[Mapping[str, Any]] = []
    records = StepRecords(
        written.append if writes else None, rows_in_step=lambda step: 8, trace_slots=None
    )
    records.on_step(report_of(1), micro_batches([1]))
    with pytest.raises(NumericsError, match=r"step 2: .*Lower optim.lr.*Nothing of it was saved"):
        records.on_step(report_of(2, **numbers), micro_batches([1]))
    assert [record["step"] for record in written] == ([1, 2] if writes else [])


def test_samples_are_written_if_they_are_traced() -> None:
    assert records_of(report_of(1), trace_slots=4)[0]["ids"] == [4, 2, 9]
    assert "ids" not in records_of(report_of(1))[0]


def ids_of(shares: list[list[list[int]]], slots: int) -> list[int]:
    return gather_ids(micro_batches(*shares[torch.distributed.get_rank()]), slots=slots)


@pytest.mark.parametrize(
    ("shares", "slots", "expected"),
    [
        ([[[5, 1], [8]], [[2], [7, 0]]], 3, [5, 1, 8, 2, 7, 0]),
        ([[[5, 1], [8]], [[2], []]], 3, [5, 1, 8, 2]),
        ([[[5]], [[]]], 1, [5]),
        ([[[3, 1]], [[4, 1, 5]]], 3, [3, 1, 4, 1, 5]),
    ],
)
def test_samples_of_all_ranks_come_in_slot_order(
    shares: list[list[list[int]]], slots: int, expected: list[int], ranks: Ranks
) -> None:
    assert ranks.run(ids_of, shares, slots, world_size=2) == [expected] * 2
