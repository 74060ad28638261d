"""Ray Train's TorchTrainer with its control loop in this process.

Stock Ray Train starts five helper processes beside the workers: the controller, a cleaner for its
placement group, a coordinator for autoscaling, a data-set manager and a preemption watcher. Each
costs a Python start and imports, seconds of CPU a run. This trainer keeps Ray's worker group, its
placement, its process-group set-up and its health checks, and runs the control loop where
``fit()`` is called. The placement group then belongs to this process's Ray job, so Ray frees it
when the process dies, whatever way it dies; nothing needs the dashboard for that. Figures and what
was given up: docs/decisions/0004-control-loop-in-the-driver.md.

It leans on classes of Ray 2.60 that are not public, so ``pyproject.toml`` holds Ray below 2.61.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import Result
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import (
    _set_torch_distributed_env_vars,
    _setup_torch_process_group,
    _TorchBackend,
)
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

_NEEDS_A_HELPER_PROCESS = (PlacementGroupCleanerCallback, DatasetsCallback)


class GangTrainer(TorchTrainer):  # type: ignore[misc]  # Ray ships no types we could check against
    """A TorchTrainer for one life of a fixed number of workers, without data sets of its own."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [each for each in callbacks if not isinstance(each, _NEEDS_A_HELPER_PROCESS)]

    def _initialize_and_run_controller(self, **parts: Any) -> Result:
        parts["scaling_policy"] = _FixedWithoutAutoscaling(self.scaling_config)
        controller = _Controller(**parts)
        asyncio.run(controller.run())
        return controller.get_result()


class _FixedWithoutAutoscaling(FixedScalingPolicy):  # type: ignore[misc]  # as above
    """The workers asked for, or none: nobody is told to buy machines."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start no coordinator."""

    def _maybe_send_resource_request(self) -> None:
        """Ask no coordinator."""

    def _cancel_resource_request(self) -> None:
        """Nothing was asked."""


class _WorkerGroup(WorkerGroup):  # type: ignore[misc]  # as above
    def _init_train_context_on_workers(
        self, workers: list[Any], sync_actor: Any, train_context_args: dict[str, list[Any]]
    ) -> None:
        # As in Ray, but for controller_actor: there is none, and only ray.train.report and
        # get_all_reported_checkpoints would call it.
        ray.get(
            [
                worker.actor.init_train_context.remote(
                    train_run_context=self._train_run_context,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=sync_actor,
                    storage_context=self._storage_context,
                    worker_callbacks=self._worker_callbacks_to_propagate,
                    controller_actor=None,
                    **{name: values[i] for name, values in train_context_args.items()},
                )
                for i, worker in enumerate(workers)
            ]
        )
        self._decorate_worker_log_file_paths(workers)


class _Controller(TrainController):  # type: ignore[misc]  # as above
    worker_group_cls = _WorkerGroup


@dataclass
class _FileRendezvousConfig(TorchConfig):  # type: ignore[misc]  # as above
    """Ranks of one machine meet in a file. Ray's way opens a port on all interfaces instead."""

    file: str = ""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _FileRendezvous


class _FileRendezvous(_TorchBackend):  # type: ignore[misc]  # as above
    def on_start(self, worker_group: Any, backend_config: _FileRendezvousConfig) -> None:
        worker_group.execute(_set_torch_distributed_env_vars)
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _setup_torch_process_group,
                    backend="cpu:gloo,cuda:nccl" if gpus else "gloo",
                    world_rank=rank,
                    world_size=len(worker_group),
                    init_method=f"file://{backend_config.file}",
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(len(worker_group))
            ]
        )


def gang_torch_config(*, folder: Path, attempt: int, timeout_s: float) -> TorchConfig:
    """Return how the workers of an attempt form a process group on this machine.

    Args:
        folder: A folder of this cluster's own.
        attempt: Each attempt meets anew.
        timeout_s: Seconds after which a collective that does not come about raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return _FileRendezvousConfig(
        timeout_s=int(max(timeout_s, 1)), file=str(folder / f"rendezvous-{attempt:03d}")
    )
