"""A Ray cluster on this machine for the length of one run: private, quiet, and gone afterwards.

All of Ray's settings are made here, each with its reason. The cluster has a folder and a token of
its own and listens on loopback only, so it neither finds another Ray on the machine nor is found by
one. Its processes end with this one, also when it is killed with SIGKILL: warden.py sees to that.

The head node is started through Ray's own ``Node``, as its cluster_utils does. ``ray.init`` would
bind to the machine's outer address, and start an autoscaler and a log monitor that a run on one
machine has no use for.
"""

import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_logging import stdout_deduplicator
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # it is Cython

from rayway.errors import ClusterError
from rayway.launch import warden
from rayway.launch.warden import MARK

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 200_000_000
"""Enough where nothing but the job's description travels through the object store."""
_WARDEN_TIMEOUT_S = 30

_SETTINGS = {
    # the default of 15 lets any other process on the machine starve training
    "RAY_worker_niceness": "0",
    # workers stay in the folder the command was given in, so relative paths mean the same
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # how late the end of training, or of a worker, is noticed; the default of 2 s is felt
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # each is a process, a port or a log file that a run on one machine does not need
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_enable_metrics_collection": "0",
    # it prints every line of a worker twice
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # nothing leaves the machine
    "RAY_USAGE_STATS_ENABLED": "0",
    # despite its name, on any system: addresses of this host are loopback addresses
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # a warning at each start, about a default that is to change
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextmanager
def local_cluster(
    *, cpus: int, start_timeout_s: float, object_store_bytes: int = OBJECT_STORE_BYTES
) -> Iterator[None]:
    """Start a Ray cluster on this machine and connect to it; at the end nothing of it is left.

    Enter it on a thread that outlives the cluster: its processes die with that thread.

    Args:
        cpus: CPUs the cluster has to give.
        start_timeout_s: Seconds a group of workers may take to start.
        object_store_bytes: Shared memory for what tasks hand to each other.

    Raises:
        ClusterError: Ray did not start, or this process is connected to another Ray.
    """
    if ray.is_initialized():
        raise ClusterError(
            "This process is connected to a Ray cluster already, and rayway starts one of its own. "
            "Call ray.shutdown() first."
        )
    folder = Path(tempfile.mkdtemp(prefix="rayway-", dir=_temporary_folder()))
    node: Node | None = None
    settings = {
        **_SETTINGS,
        MARK: str(folder),
        "GLOO_SOCKET_IFNAME": _loopback_interface(),  # the workers' own connections
        "RAY_AUTH_TOKEN_PATH": str(_write_token(folder)),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(start_timeout_s),
    }
    with _warden(folder), _environment(settings):
        try:
            try:
                # Ray prints its own errors to stdout, which is for what a script reads; what they
                # tell is raised as well
                stdout_deduplicator.skip_re = re.compile("")
                node = _start_head(folder, cpus=cpus, object_store_bytes=object_store_bytes)
                with _own_signals():
                    ray.init(
                        address=node.gcs_address,
                        log_to_driver=False,  # what workers print goes into the run folder
                        logging_level=logging.CRITICAL,
                    )
            except Exception as error:
                raise ClusterError(
                    f"Ray did not start on this machine: {error}. Look for a full disk, too little "
                    f"memory, or a limit on processes."
                ) from error
            yield
        finally:
            ray.shutdown()
            if node is not None:
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's way of taking SIGTERM: Ray puts its own in place, which just exits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ray_folder() -> Path:
    """Return a folder for what Ray writes of its own accord; it goes with the cluster."""
    return Path(ray._private.worker._global_node.get_session_dir_path()) / "train"


@contextmanager
def _warden(folder: Path) -> Iterator[None]:
    """Have whatever is left ended, and the folder removed, at the end or when this process dies."""
    with subprocess.Popen(
        [sys.executable, warden.__file__, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us, not for it
    ) as process:
        yield
        assert process.stdin is not None, "it was made with a pipe"
        process.stdin.close()
        process.wait(timeout=_WARDEN_TIMEOUT_S)


def _start_head(folder: Path, *, cpus: int, object_store_bytes: int) -> Node:
    return Node(
        RayParams(
            node_ip_address=LOOPBACK,
            dashboard_host=LOOPBACK,
            dashboard_agent_listen_port=None,  # any free port: two runs may share a machine
            gcs_server_port=0,
            num_cpus=cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,  # nothing here needs it, see gang.py
            include_log_monitor=False,
            no_monitor=True,  # the autoscaler
            temp_dir=str(folder / "r"),  # Ray opens it to everybody; the folder above stays shut
        ),
        head=True,
        shutdown_at_exit=False,  # local_cluster does it
        spawn_reaper=True,
    )


def _loopback_interface() -> str:
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == LOOPBACK for each in addresses)
    )


def _temporary_folder() -> Path:
    """Return a folder with a short name: the path of a Unix socket has 107 characters at most."""
    short = Path("/tmp")  # noqa: S108 - what is made in it is ours alone
    return short if short.is_dir() else Path(tempfile.gettempdir())


def _write_token(folder: Path) -> Path:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return token


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Apply Ray's settings to this process, which may have imported Ray long ago, and undo them."""
    touched = (*settings, "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name, None) for name in touched}
    clustered = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(settings)
    AuthenticationTokenLoader.instance().reset_cache()  # it may hold an earlier cluster's token
    _enable_token_auth()
    ray_constants.ENABLE_RAY_CLUSTER = False  # what the variable above sets in the other processes
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clustered
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
