"""An attempt on Ray: as many workers as asked for, each running one rank."""

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from rayway.data.recipe import ReaderRecipe
from rayway.errors import ClusterError, LostError, SpecError
from rayway.launch.cluster import OBJECT_STORE_BYTES, local_cluster, ray_folder
from rayway.launch.engine_choice import choose_engine
from rayway.launch.preflight import available_cpus
from rayway.spec.job import Job
from rayway.spec.load import Resolved, job_from_json
from rayway.storage.runs import RunFolder

_BLOCK_BYTES = 400 << 20
_BLOCK_BYTES_PER_CPU = 100 << 20
_MEMORY_SHARE = 8
_PATIENCE = 0.9  # of the step's deadline: who waits for data is to say so before it is ended


class WorkersLostError(Exception):
    """Workers ended before their rank was through. Says which, as far as Ray knows."""


class RayWorkers:
    """Starts groups of workers on a running cluster, one after the other.

    Args:
        job: What they train.
        workers: How many.
        data_cpus: CPUs beside the workers for reading and transforming; 0: the workers do it.
        block_bytes: Of the object store, what rows on their way to the workers may occupy.
    """

    def __init__(self, job: Job, *, workers: int, data_cpus: int = 0, block_bytes: int = 0) -> None:
        self._job = job
        self._workers = workers
        self._data_cpus, self._block_bytes = data_cpus, block_bytes
        self._gpus = _gpus_per_worker(job, workers)

    def run(self, run_url: str, attempt: int) -> str:
        """Run one attempt to its end and return the state it ended in.

        Raises:
            WorkersLostError: A worker died, or raised; the run folder may know more.
            ClusterError: The workers did not start in time.
        """
        outcome: list[str | BaseException] = []
        # Ray's control loop may not run on the thread that has to answer signals
        thread = threading.Thread(
            target=lambda: outcome.append(self._live(run_url, attempt)), name="fit", daemon=True
        )
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.2)  # in between, Python runs signal handlers
        ended = outcome[0] if outcome else WorkersLostError("Ray's control loop ended")
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _live(self, run_url: str, attempt: int) -> str | BaseException:
        """Run an attempt with a router of its own, if Ray Data reads."""
        if not self._data_cpus:
            return self._fit(run_url, attempt, router=None)
        from rayway.data.router import start_router  # noqa: PLC0415 - most runs have none

        router = start_router(
            world_size=self._workers, data_cpus=self._data_cpus, store_bytes=self._block_bytes
        )
        try:
            return self._fit(run_url, attempt, router=router)
        finally:
            ray.kill(router)  # its pipelines and their tasks end with it

    def _fit(self, run_url: str, attempt: int, *, router: Any) -> str | BaseException:
        from ray.train import (  # noqa: PLC0415 - see _warm_up
            ControllerError,
            FailureConfig,
            LoggingConfig,
            RunConfig,
            ScalingConfig,
            WorkerGroupError,
        )

        from rayway.launch.gang import GangTrainer, gang_torch_config  # noqa: PLC0415

        trainer = GangTrainer(
            work_on_rank,
            train_loop_config={"run_url": run_url, "attempt": attempt, "router": router},
            torch_config=gang_torch_config(
                folder=ray_folder(), attempt=attempt, timeout_s=self._job.scale.step_timeout_s
            ),
            scaling_config=ScalingConfig(
                num_workers=self._workers,
                use_gpu=self._gpus > 0,
                resources_per_worker={
                    "CPU": self._job.scale.cpus_per_worker,
                    **({"GPU": self._gpus} if self._gpus else {}),
                },
            ),
            run_config=RunConfig(
                name=f"attempt-{attempt:03d}",
                storage_path=str(ray_folder()),
                # whether to try again is decided by launch/attempts.py
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                logging_config=LoggingConfig(log_level="CRITICAL"),
            ),
        )
        try:
            return str(trainer.fit().return_value)
        except WorkerGroupError as error:
            return WorkersLostError(_who_died(error))
        except ControllerError as error:
            return ClusterError(
                f"the {self._workers} workers did not start within "
                f"scale.start_timeout_s={self._job.scale.start_timeout_s:g} s: {error}"
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            return error


def work_on_rank(config: dict[str, Any]) -> str:
    """Train as the rank that Ray gave this worker. Called by Ray in each of them."""
    from ray.train import get_context  # noqa: PLC0415 - only in a worker

    from rayway.train.output import keep_output  # noqa: PLC0415
    from rayway.train.worker import RankTask, run_rank  # noqa: PLC0415

    context = get_context()
    task = RankTask(
        run_url=config["run_url"],
        attempt=config["attempt"],
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        shared_engine=_shared_engine(config, context),
    )
    with keep_output(task.run_url, task.attempt, task.rank):
        return run_rank(task)


def _shared_engine(config: dict[str, Any], context: Any) -> Any:
    """Return this rank's end of the shared pipelines, or ``None`` if it reads for itself."""
    if config["router"] is None:
        return None
    from rayway.data.rows import shared_engine  # noqa: PLC0415 - as above
    from rayway.train.feeds import TRAINING, VALIDATION  # noqa: PLC0415 - only in a worker

    resolved = job_from_json(RunFolder.open(config["run_url"]).job_json())
    return shared_engine(
        config["router"],
        {kind: _recipe(resolved, training=kind == TRAINING) for kind in (TRAINING, VALIDATION)},
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        timeout_s=_PATIENCE * resolved.job.scale.step_timeout_s,
    )


def _recipe(resolved: Resolved, *, training: bool) -> ReaderRecipe:
    job = resolved.job
    return ReaderRecipe(
        code_root=resolved.code_root,
        transform=None if job.data.transform is None else str(job.data.transform),
        columns=job.data.columns,
        seed=job.seed,
        training=training,
        invalid=job.data.invalid,
        pad=job.data.pad,
    )


@contextmanager
def ray_workers(job: Job, *, workers: int) -> Iterator[RayWorkers]:
    """Start a cluster on this machine and yield what runs attempts on it.

    Raises:
        ClusterError: Ray did not start.
        SpecError: The machine has too few GPUs, or no CPU for the data engine.
    """
    cpus = max(available_cpus(), 1)
    engine = choose_engine(job, workers=workers, cpus=cpus)
    blocks = _block_bytes(engine.data_cpus) if engine.data_cpus else 0
    _warm_up()
    with local_cluster(
        cpus=cpus,
        start_timeout_s=job.scale.start_timeout_s,
        object_store_bytes=OBJECT_STORE_BYTES + blocks,
    ):
        yield RayWorkers(job, workers=workers, data_cpus=engine.data_cpus, block_bytes=blocks)


def _block_bytes(cpus: int) -> int:
    """Return what rows on their way may occupy of this machine's memory."""
    available = int(psutil.virtual_memory().available)
    return min(_BLOCK_BYTES + cpus * _BLOCK_BYTES_PER_CPU, available // _MEMORY_SHARE)


def _warm_up() -> None:
    """Import torch and Ray Train while the cluster starts: two seconds less to wait."""
    threading.Thread(
        target=importlib.import_module, args=("rayway.launch.gang",), name="warm-up", daemon=True
    ).start()


def _gpus_per_worker(job: Job, workers: int) -> int:
    there = int(ray.cluster_resources().get("GPU", 0))
    asked = job.scale.gpus_per_worker
    each = (1 if there else 0) if asked is None else asked
    if workers * each > there:
        raise SpecError(
            f"scale.workers={workers} x {each} GPU need {workers * each} GPUs and this machine has "
            f"{there}. Use {there or 'no'} workers with a GPU, or scale.gpus_per_worker=0."
        )
    return each


def _who_died(error: Any) -> str:
    """Say which worker processes went away. Others only noticed it: their collectives failed."""
    failures = error.worker_failures
    dead = sorted(rank for rank, cause in failures.items() if _is_death(cause))
    lost = [cause for cause in failures.values() if isinstance(cause, LostError)]
    if lost and not dead:
        return str(lost[0])
    dead = dead or sorted(failures)
    which = f"process of rank {dead[0]}" if len(dead) == 1 else f"processes of ranks {dead}"
    return f"the worker {which} died (killed, crashed, or out of memory)"


def _is_death(cause: BaseException) -> bool:
    cause = getattr(cause, "health_check_failure", cause)
    return isinstance(cause, ray.exceptions.RayActorError)
