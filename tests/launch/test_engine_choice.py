from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import SpecError
from rayway.launch.engine_choice import EngineChoice, choose_engine
from rayway.spec.job import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec, ScaleSpec


def job(*, transform: str | None = "m:transform", **scale: Any) -> Job:
    return Job(
        name="j",
        model=ModelSpec(build="m:build"),
        loss="m:loss",
        data=DataSpec(train="/data", transform=transform),
        batch=BatchSpec(global_batch=8),
        optim=OptimSpec(lr=0.1, steps=1),
        scale=ScaleSpec(**scale),
    )


def choose(workers: int, cpus: float, **settings: Any) -> EngineChoice:
    return choose_engine(job(**settings), workers=workers, cpus=cpus)


def test_a_transform_goes_to_ray_if_a_cpu_is_left() -> None:
    choice = choose(2, 8, cpus_per_worker=1.5)
    assert (choice.name, choice.data_cpus) == ("ray", 5)
    assert choice.reason == (
        "Ray Data reads and transforms on 5 CPUs beside the workers, for data.transform "
        "(scale.data_engine=auto)"
    )


def test_ready_rows_are_read_by_the_workers() -> None:
    choice = choose(2, 8, transform=None)
    assert (choice.name, choice.data_cpus) == ("local", 0)
    assert "without a data.transform" in choice.reason


def test_no_cpu_left_means_the_workers_transform() -> None:
    choice = choose(2, 2)
    assert choice.name == "local"
    assert "the 2 workers have all 2 CPUs" in choice.reason


def test_a_part_of_a_cpu_is_none() -> None:
    assert choose(2, 3, cpus_per_worker=1.1).name == "local"
    assert choose(2, 3, cpus_per_worker=1.0).name == "ray"


def test_without_workers_it_is_this_process() -> None:
    assert choose(0, 8).name == "local"
    with pytest.raises(SpecError, match=r"scale\.data_engine=ray needs workers"):
        choose(0, 8, data_engine="ray")


def test_what_is_asked_for_is_done() -> None:
    assert choose(1, 8, data_engine="local").reason.endswith("as scale.data_engine=local says")
    choice = choose(1, 2, data_engine="ray", transform=None)
    assert (choice.name, choice.data_cpus) == ("ray", 1)
    assert choice.reason == (
        "Ray Data reads and transforms on 1 CPU beside the workers, as scale.data_engine=ray says"
    )


@pytest.mark.parametrize(
    ("workers", "each", "cpus", "repair"),
    [
        (4, 1.0, 4, "Use scale.workers=3 or fewer, or scale.data_engine=local."),
        (1, 4.0, 4, "Use scale.cpus_per_worker=3 or less, or scale.data_engine=local."),
        (3, 1.0, 2, "Use scale.workers=1 or fewer, or scale.data_engine=local."),
        (1, 1.0, 1, "Use scale.data_engine=local."),
    ],
)
def test_ray_without_a_cpu_is_refused_with_the_numbers(
    workers: int, each: float, cpus: int, repair: str
) -> None:
    with pytest.raises(SpecError) as refused:
        choose(workers, cpus, data_engine="ray", cpus_per_worker=each)
    assert str(refused.value) == (
        f"scale.data_engine=ray: scale.workers={workers} x scale.cpus_per_worker={each:g} = "
        f"{workers * each:g} CPUs, the cluster has {cpus}, and data tasks need at least 1. "
        f"{repair}"
    )


@given(
    workers=st.integers(0, 9),
    cpus=st.integers(1, 16),
    each=st.floats(0.1, 4),
    asked=st.sampled_from(["auto", "local"]),
    transform=st.none() | st.just("m:t"),
)
def test_workers_and_data_tasks_fit_on_the_cluster(
    workers: int, cpus: int, each: float, asked: str, transform: str | None
) -> None:
    choice = choose(workers, cpus, cpus_per_worker=each, data_engine=asked, transform=transform)
    assert (choice.name == "ray") == (choice.data_cpus > 0)
    if choice.name == "ray":
        assert workers * each + choice.data_cpus <= cpus
