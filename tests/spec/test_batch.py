import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import SpecError
from rayway.spec.batch import (
    accumulation,
    nearest_global_batches,
    nearest_micro_batches,
    plan_batch,
)
from rayway.spec.job import BatchSpec

sizes = st.integers(1, 5000)
ranks = st.integers(1, 64)


@given(micro_batch=st.integers(1, 64), passes=st.integers(1, 64), dp_size=ranks)
def test_a_batch_that_divides_is_cut_into_equal_passes(
    micro_batch: int, passes: int, dp_size: int
) -> None:
    spec = BatchSpec(global_batch=micro_batch * passes * dp_size, micro_batch=micro_batch)
    plan = plan_batch(spec, dp_size=dp_size)
    assert plan.accumulation == passes
    assert plan.dp_size * plan.accumulation * plan.micro_batch == plan.global_batch


@given(share=st.integers(1, 1000), dp_size=ranks)
def test_without_a_micro_batch_a_rank_takes_its_whole_share(share: int, dp_size: int) -> None:
    plan = plan_batch(BatchSpec(global_batch=share * dp_size), dp_size=dp_size)
    assert (plan.micro_batch, plan.accumulation) == (share, 1)


@given(global_batch=sizes, micro_batch=sizes, dp_size=ranks)
def test_every_value_that_a_refusal_names_is_valid(
    global_batch: int, micro_batch: int, dp_size: int
) -> None:
    try:
        accumulation(global_batch=global_batch, micro_batch=micro_batch, dp_size=dp_size)
    except SpecError as error:
        repair = str(error).partition("Use ")[2]
        whole, _, micro = repair.partition("batch.micro_batch")
        wholes = [int(number) for number in re.findall(r"\d+", whole)]
        micros = [int(number) for number in re.findall(r"\d+", micro)]
        assert wholes
        for number in wholes:
            accumulation(global_batch=number, micro_batch=micro_batch, dp_size=dp_size)
        for number in micros:
            accumulation(global_batch=global_batch, micro_batch=number, dp_size=dp_size)
    else:
        assert global_batch % (micro_batch * dp_size) == 0


@given(global_batch=sizes, dp_size=ranks)
def test_every_value_that_a_refusal_without_micro_batch_names_is_valid(
    global_batch: int, dp_size: int
) -> None:
    try:
        plan_batch(BatchSpec(global_batch=global_batch), dp_size=dp_size)
    except SpecError as error:
        for number in re.findall(r"\d+", str(error).partition("Use ")[2]):
            plan_batch(BatchSpec(global_batch=int(number)), dp_size=dp_size)
    else:
        assert global_batch % dp_size == 0


@given(global_batch=sizes, per_pass=sizes)
def test_no_valid_global_batch_is_nearer_than_the_ones_named(
    global_batch: int, per_pass: int
) -> None:
    below, above = nearest_global_batches(global_batch, per_pass=per_pass)
    between = range((below or 0) + 1, above)
    assert global_batch in between or global_batch == below
    assert not any(number % per_pass == 0 for number in between)


@given(share=st.integers(1, 2000), micro_batch=st.integers(1, 2500), dp_size=ranks)
def test_no_valid_micro_batch_is_nearer_than_the_ones_named(
    share: int, micro_batch: int, dp_size: int
) -> None:
    valid = [size for size in range(1, share + 1) if share % size == 0 and size != micro_batch]
    named = nearest_micro_batches(share * dp_size, micro_batch=micro_batch, dp_size=dp_size)
    below = [size for size in valid if size < micro_batch][-1:]
    above = [size for size in valid if size > micro_batch][:1]
    assert named == below + above


def test_the_refusal_names_values_limit_and_repair() -> None:
    with pytest.raises(SpecError) as caught:
        accumulation(global_batch=1000, micro_batch=16, dp_size=8)
    assert str(caught.value) == (
        "batch.global_batch=1000 does not split over 8 ranks: it is not a multiple of micro_batch "
        "x ranks = 16 x 8 = 128. Use 896 or 1024, or batch.micro_batch=5 or 25."
    )


def test_where_no_smaller_value_exists_only_the_larger_is_named() -> None:
    with pytest.raises(SpecError, match=r"3 ranks\. Use 3, or change scale\.workers\."):
        plan_batch(BatchSpec(global_batch=2), dp_size=3)


def test_the_plan_reads_as_a_sentence() -> None:
    plan = plan_batch(BatchSpec(global_batch=64, micro_batch=8), dp_size=2)
    assert plan.sentence() == "A step takes 64 samples: 2 ranks x 4 micro-batches x 8 samples."
    single = plan_batch(BatchSpec(global_batch=1), dp_size=1)
    assert single.sentence() == "A step takes 1 sample: 1 rank x 1 micro-batch x 1 sample."
