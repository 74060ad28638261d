import pytest

from rayway.errors import SpecError
from rayway.spec.callsite import display
from rayway.spec.job import Job, ModelSpec, OptimSpec
from rayway.spec.section import Problem, SectionError, all_fields


def test_a_refusal_outside_any_job_file_names_this_file_and_line() -> None:
    with pytest.raises(SpecError) as caught:
        OptimSpec(
            lr=0.1,
            steps=-5,
        )
    assert str(caught.value).startswith(f"{display(__file__)}:13: optim.steps=-5")


def test_a_refusal_holds_its_problems_for_callers_that_know_better_where() -> None:
    with pytest.raises(SectionError) as caught:
        OptimSpec(lr=0.1, steps=-5)
    text = "optim.steps=-5 is out of range: it must be at least 1."
    assert caught.value.problems == [Problem(("optim", "steps"), text)]


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(SpecError) as caught:
        ModelSpec(build="x" * 10_000)
    assert len(str(caught.value)) < 400


def test_values_without_a_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"by name only, e\.g\. OptimSpec\(name=0\.1\)"):
        OptimSpec(0.1)  # type: ignore[call-arg, arg-type]  # that is the point


def test_all_fields_are_those_of_the_job_and_of_its_sections() -> None:
    assert {"optim", "optim.lr", "seed", "model.args"} <= set(all_fields())
    assert set(Job.model_fields) <= set(all_fields())
