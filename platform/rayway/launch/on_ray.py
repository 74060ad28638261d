"""An attempt on Ray: as many workers as asked for, each running one rank."""

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from rayway.errors import ClusterError, SpecError
from rayway.launch.cluster import local_cluster, ray_folder
from rayway.launch.preflight import available_cpus
from rayway.spec.job import Job


class WorkersLostError(Exception):
    """Workers ended before their rank was through. Says which, as far as Ray knows."""


class RayWorkers:
    """Starts groups of workers on a running cluster, one after the other."""

    def __init__(self, job: Job, *, workers: int) -> None:
        self._job = job
        self._workers = workers
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
            target=lambda: outcome.append(self._fit(run_url, attempt)), name="fit", daemon=True
        )
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.2)  # in between, Python runs signal handlers
        ended = outcome[0] if outcome else WorkersLostError("Ray's control loop ended")
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _fit(self, run_url: str, attempt: int) -> str | BaseException:
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
            train_loop_config={"run_url": run_url, "attempt": attempt},
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
    )
    with keep_output(task.run_url, task.attempt, task.rank):
        return run_rank(task)


@contextmanager
def ray_workers(job: Job, *, workers: int) -> Iterator[RayWorkers]:
    """Start a cluster on this machine and yield what runs attempts on it.

    Raises:
        ClusterError: Ray did not start.
        SpecError: The machine has too few GPUs.
    """
    _warm_up()
    with local_cluster(cpus=max(available_cpus(), 1), start_timeout_s=job.scale.start_timeout_s):
        yield RayWorkers(job, workers=workers)


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
    dead = sorted(
        rank for rank, cause in error.worker_failures.items() if _is_death(cause)
    ) or sorted(error.worker_failures)
    which = f"process of rank {dead[0]}" if len(dead) == 1 else f"processes of ranks {dead}"
    return f"the worker {which} died (killed, crashed, or out of memory)"


def _is_death(cause: BaseException) -> bool:
    cause = getattr(cause, "health_check_failure", cause)
    return isinstance(cause, ray.exceptions.RayActorError)
