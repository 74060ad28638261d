"""Every moment belongs to one part."""

import time

from rayway.train.clock import PARTS, Clock


def test_the_parts_add_up_to_the_time_that_passed() -> None:
    began = time.perf_counter()
    clock = Clock()
    for part in ("setup_s", "step_s", "data_wait_s", "step_s"):
        time.sleep(0.01)
        clock.lap(part)
    passed = time.perf_counter() - began
    seconds = clock.seconds()
    assert tuple(seconds) == PARTS
    assert 0.04 <= sum(seconds.values()) <= passed + 0.001  # each is rounded
    assert seconds["step_s"] >= 0.02
    assert seconds["setup_s"] >= 0.01
    assert seconds["save_s"] == 0.0
