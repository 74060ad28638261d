"""Where the time went, in words."""

import pytest

from rayway.report.sentences import lower_is_better, shares, time_sentence


@pytest.mark.parametrize(
    ("clock", "sentence"),
    [
        ({}, None),
        ({"step_s": 0.0}, None),
        ({"step_s": 42.0}, "Of 42 s, 100 % computing."),
        (
            {"step_s": 88.0, "data_wait_s": 7.0, "save_s": 5.0},
            "Of 1 min 40 s, 88 % computing, 7 % waiting for data and 5 % saving checkpoints.",
        ),
        (
            {"step_s": 50.0, "data_wait_s": 49.8, "odd_thing_s": 0.2},
            "Of 1 min 40 s, 50 % computing and 50 % waiting for data. Data is the bottleneck.",
        ),
        ({"step_s": 6.0, "total_s": 8.0}, "Of 8.0 s, 75 % computing and 25 % the rest."),
        ({"odd_thing_s": 5.0}, "Of 5.0 s, 100 % odd thing."),
    ],
)
def test_the_time_is_told_in_a_sentence(clock: dict[str, float], sentence: str | None) -> None:
    assert time_sentence(clock) == sentence


def test_shares_add_up_to_all() -> None:
    parts = shares({"step_s": 3.0, "data_wait_s": 5.0, "total_s": 9.0})
    assert [name for name, _, _ in parts] == ["data_wait", "step", "the rest"]
    assert sum(share for _, _, share in parts) == pytest.approx(1)
    assert sum(seconds for _, seconds, _ in parts) == pytest.approx(9)


@pytest.mark.parametrize("name", ["loss", "val_loss", "val/loss", "RMSE", "word-error"])
def test_losses_and_errors_are_better_when_small(name: str) -> None:
    assert lower_is_better(name)


@pytest.mark.parametrize("name", ["accuracy", "f1", "closs", "gloss_rate"])
def test_others_are_better_when_large(name: str) -> None:
    assert not lower_is_better(name)
