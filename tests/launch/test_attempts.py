"""Whether a run tries again, from what happened so far."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.launch.attempts import Again, GiveUp, Life, plan_next
from rayway.train.failure import Kind, RankError


def error_of(kind: Kind, step: int, error: str = "ValueError") -> RankError:
    return RankError(rank=0, kind=kind, error=error, message="m", step=step, exit_code=4)


def life(from_step: int, to_step: int, failure: RankError | None = None) -> Life:
    return Life(attempt=1, from_step=from_step, to_step=to_step, failure=failure, what="it died")


def user(from_step: int, to_step: int, step: int, error: str = "ValueError") -> Life:
    return life(from_step, to_step, error_of("user", step, error))


IDLE, BUSY = life(5, 5), life(5, 10)

Verdict = Literal["again", "give up"]
CASES: dict[str, tuple[list[Life], int, Verdict]] = {
    "a killed process": ([BUSY], 3, "again"),
    "a killed process before any checkpoint": ([IDLE], 3, "again"),
    "the last idle life": ([IDLE, IDLE], 2, "give up"),
    "one life only": ([IDLE], 1, "give up"),
    "one life only, but it got on": ([BUSY], 1, "again"),
    "progress begins the count anew": ([IDLE, IDLE, BUSY, IDLE, IDLE], 3, "again"),
    "and then it runs out": ([BUSY, IDLE, IDLE, IDLE], 3, "give up"),
    "a refusal": ([life(0, 5, error_of("refused", 7))], 9, "give up"),
    "a refusal after others": ([BUSY, BUSY, life(0, 5, error_of("refused", 7))], 9, "give up"),
    "an echo of a lost rank": ([life(0, 5, error_of("peer", 7))], 9, "again"),
    "the user's exception, once": ([user(0, 5, 7)], 9, "again"),
    "before the life's first step": ([user(5, 5, 5)], 9, "give up"),
    "in the build": ([user(0, 0, 0)], 9, "give up"),
    "the same at the same step": ([user(0, 5, 7), user(5, 5, 7)], 9, "give up"),
    "the same, with a killed process between": ([user(0, 5, 7), IDLE, user(5, 5, 7)], 9, "give up"),
    "the same at a later step": ([user(0, 5, 7), user(5, 5, 8)], 9, "again"),
    "another at the same step": ([user(0, 5, 7), user(5, 5, 7, "KeyError")], 9, "again"),
    "an idle one of the user's": ([user(5, 5, 7), user(5, 5, 8)], 2, "give up"),
}


@pytest.mark.parametrize(("lives", "most", "verdict"), CASES.values(), ids=CASES)
def test_it_tries_again_or_gives_up(lives: list[Life], most: int, verdict: Verdict) -> None:
    decision = plan_next(lives, max_attempts=most)
    assert isinstance(decision, Again if verdict == "again" else GiveUp)


def test_the_reason_says_what_happened_and_which_limit_it_met() -> None:
    idle = plan_next([IDLE, IDLE], max_attempts=2)
    again = plan_next([user(0, 5, 7), user(5, 5, 7)], max_attempts=9)
    refused = plan_next([life(0, 5, error_of("refused", 7))], max_attempts=9)
    assert isinstance(idle, GiveUp)
    assert isinstance(again, GiveUp)
    assert idle.reason == (
        "it died; 2 lives in a row committed no new checkpoint (scale.max_attempts=2)"
    )
    assert again.reason == "it died, at step 7 again"
    assert refused == GiveUp(reason="it died")


@given(idle=st.integers(0, 40))
def test_pauses_grow_from_none_to_a_minute(idle: int) -> None:
    decision = plan_next([BUSY, *[IDLE] * idle], max_attempts=100)
    assert isinstance(decision, Again)
    assert decision.after_s == (0 if idle < 2 else min(2 ** (idle - 1), 60))


FAILURES = st.none() | st.builds(
    error_of, st.sampled_from(["user", "peer", "refused"]), st.integers(0, 30)
)
LIVES = st.builds(
    lambda start, more, failure: life(start, start + more, failure),
    st.integers(0, 20),
    st.integers(0, 3),
    FAILURES,
)


@given(lives=st.lists(LIVES, min_size=1, max_size=12), most=st.integers(1, 5))
def test_it_ends_after_so_many_lives_without_progress(lives: list[Life], most: int) -> None:
    without = lives[-most:] if len(lives) >= most else []
    stuck = bool(without) and all(each.to_step == each.from_step for each in without)
    decision = plan_next(lives, max_attempts=most)
    if stuck:
        assert isinstance(decision, GiveUp)
    elif lives[-1].failure is None or lives[-1].failure.kind == "peer":
        assert isinstance(decision, Again)


@given(lives=st.lists(LIVES, max_size=6))
def test_a_killed_process_that_got_on_is_always_started_again_at_once(lives: list[Life]) -> None:
    assert plan_next([*lives, BUSY], max_attempts=1) == Again(after_s=0.0)
