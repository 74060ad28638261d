"""Whole runs whose data comes from Ray Data beside the workers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from rayway.errors import SpecError
from rayway.launch.fit import run
from rayway.launch.on_ray import ray_workers
from rayway.launch.preflight import available_cpus
from rayway.spec.code import enter_code_root, leave_code_root
from rayway.spec.job import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    Job,
    ModelSpec,
    OptimSpec,
    ScaleSpec,
)
from rayway.spec.load import resolve_job

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray Train warns of its own parts in the driver
]

CODE = """
import time
import numpy as np
from torch import nn
from rayway.train.loss import Loss

def build():
    return nn.Linear(4, 1)

def loss(model, batch):
    time.sleep(0.02)
    error = model(batch["x"]).squeeze(1) - batch["x"].sum(1) + batch["large"].mean()
    return Loss(sum=(error**2).sum(), weight=len(error))

def transform(columns, rng):
    # a row is 1 MB, so that the run's data does not fit into what is read ahead
    x = columns["x"] + (rng.uniform(0).astype("float32")[:, None] if rng.training else 0)
    return {"x": x, "large": np.zeros((len(x), 1 << 18), np.float32)}
"""


@dataclass
class Project:
    root: Path

    def job(self, **scale: Any) -> Job:
        # two workers share a CPU, so that two CPUs leave one
        return Job(
            name="on-ray",
            model=ModelSpec(build="on_ray_code:build"),
            loss="on_ray_code:loss",
            data=DataSpec(
                train=str(self.root / "data"),
                validation=str(self.root / "data"),
                transform="on_ray_code:transform",
                lanes=4,
                window=1,
            ),
            batch=BatchSpec(global_batch=8),
            optim=OptimSpec(lr=0.01, steps=80),
            evaluate=EvaluateSpec(every_steps=50),
            checkpoint=CheckpointSpec(every_steps=4),
            scale=ScaleSpec(**{"workers": 2, "cpus_per_worker": 0.5, **scale}),
            trace=True,
        )

    def run(self, run_id: str, **scale: Any) -> "Story":
        code = self.root / "code"
        resolved = replace(resolve_job(self.job(**scale)), code_root=code)
        enter_code_root(code)
        storage = self.root / "runs"
        result = run(resolved, storage=str(storage), run_id=run_id, show=False)
        assert result.state == "FINISHED"
        return Story(storage / run_id)


@dataclass
class Story:
    """What a run's folder tells."""

    folder: Path

    def events(self) -> list[dict[str, Any]]:
        logs = sorted(self.folder.glob("attempts/*/events-00000.jsonl"))
        return [json.loads(line) for log in logs for line in log.read_text().splitlines()]

    def steps(self) -> dict[int, Any]:
        """Return ids and loss of each step; of those that lives share, the last one's."""
        kind = [each for each in self.events() if each["type"] == "step"]
        return {each["step"]: (each["loss_hex"], each["ids"]) for each in kind}

    def evaluations(self) -> dict[int, Any]:
        kind = [each for each in self.events() if each["type"] == "evaluate"]
        return {each["step"]: (each["metrics"], each["rows"]) for each in kind}

    def end(self) -> dict[str, Any]:
        return self.events()[-1]

    def attempts(self) -> int:
        return len(list(self.folder.glob("attempts/*")))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    root = tmp_path_factory.mktemp("project")
    (root / "code").mkdir()
    (root / "code" / "on_ray_code.py").write_text(CODE)
    (root / "data").mkdir()
    x = np.random.default_rng(0).normal(size=80).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x), 4)})
    for name in ("a", "b"):
        pq.write_table(table, root / "data" / f"{name}.parquet", row_group_size=7)
    yield Project(root)
    leave_code_root()


@pytest.fixture(scope="module")
def local(project: Project) -> Story:
    """The same job with workers that read for themselves."""
    if available_cpus() < 2:
        pytest.skip("two workers share a CPU and data tasks need another")
    return project.run("local", data_engine="local")


def test_a_run_on_ray_data_is_that_of_workers_who_read_for_themselves(
    project: Project, local: Story
) -> None:
    seen: list[str] = []
    with watch(lambda: seen.extend(each.name() for each in routers())):
        story = project.run("ray", data_engine="ray")
    assert seen
    assert_same(story, local)
    assert story.attempts() == 1


def test_auto_takes_ray_for_a_transform_and_a_killed_router_costs_an_attempt_only(
    project: Project, local: Story
) -> None:
    killed: list[int] = []

    def kill() -> None:
        if not killed and len(Story(project.root / "runs" / "killed").steps()) > 5:
            for router in routers():
                router.kill()
                killed.append(router.pid)

    with watch(kill):
        story = project.run("killed")
    assert killed
    assert_same(story, local)
    assert story.attempts() == 2
    first = json.loads((story.folder / "attempts" / "001" / "end.json").read_text())
    assert first["reason"].startswith("the data pipeline lost a process or a node")


def assert_same(story: Story, other: Story) -> None:
    assert story.steps() == other.steps()
    assert story.evaluations() == other.evaluations()
    assert list(story.evaluations()) == [50, 80]
    assert story.end()["weights_sha256"] == other.end()["weights_sha256"]


def routers() -> list[psutil.Process]:
    """Return this process's routers; Ray names a process for the actor in it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith("ray::Router"):
                found.append(process)
        except psutil.Error:
            continue
    return found


class watch:  # noqa: N801 - it reads as a statement
    """Does something over and over, in a thread beside the run."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._done = action, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._done.wait(0.1):
            self._action()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def test_ray_data_without_a_cpu_is_refused_before_anything_starts(project: Project) -> None:
    cpus = available_cpus()
    job = project.job(workers=cpus, cpus_per_worker=1, data_engine="ray")
    begin = time.monotonic()
    with (
        pytest.raises(SpecError, match=r"data tasks need at least 1"),
        ray_workers(job, workers=cpus),
    ):
        pass
    assert not ray.is_initialized()
    assert time.monotonic() - begin < 2
