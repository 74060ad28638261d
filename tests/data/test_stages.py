import threading
import time

from rayway.data.stages import DECODE, READ, TRANSFORM, Stages


def burn(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_waiting_counts_as_read_and_computing_as_decode() -> None:
    stages = Stages()
    with stages.reading():
        time.sleep(0.2)
        burn(0.1)
    seconds = stages.seconds()
    assert 0.19 < seconds[READ] < 0.29, "the 0.1 s of computing is no reading"
    assert 0.09 < seconds[DECODE] < 0.4
    assert seconds[TRANSFORM] == 0


def test_a_body_that_raises_counts_too() -> None:
    stages = Stages()
    for body in (stages.reading, stages.transforming):
        try:
            with body():
                time.sleep(0.02)
                raise KeyError("x")
        except KeyError:
            pass
    assert stages.seconds()[READ] > 0.015
    assert stages.seconds()[TRANSFORM] > 0.015


def test_threads_in_each_others_way_are_told_from_threads_that_wait_for_storage() -> None:
    asleep, jammed = Stages(), Stages()

    def sleep() -> None:
        with asleep.transforming():
            burn(0.01)
        with asleep.reading():
            time.sleep(0.1)

    def compute() -> None:
        with jammed.transforming():  # Python's lock lets one at a time
            burn(0.1)

    for work in (sleep, compute):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert asleep.contended_s < 0.25 * sum(asleep.seconds().values())
    assert jammed.contended_s > 0.5 * sum(jammed.seconds().values())


def test_seconds_add_up_over_threads_and_names() -> None:
    stages = Stages()

    def add() -> None:
        for _ in range(1000):
            stages.add(READ, 1.0)
            stages.add("transfer", 2.0)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stages.seconds() == {READ: 8000.0, DECODE: 0.0, TRANSFORM: 0.0, "transfer": 16000.0}
