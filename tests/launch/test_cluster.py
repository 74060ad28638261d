"""The local cluster is private: loopback only, a token of its own, and gone with its owner."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

OWNER = """
import json, os, sys
import psutil, ray
from rayway.launch.cluster import local_cluster

with local_cluster(cpus=1, start_timeout_s=60, object_store_bytes=150_000_000):
    @ray.remote(num_cpus=1)
    def work():
        return os.getcwd()
    here = ray.get(work.remote())
    family = psutil.Process().children(recursive=True)
    listening = [
        connection.laddr.ip
        for process in (psutil.Process(), *family)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    environment = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    print(json.dumps({
        "cwd": here, "listening": listening, "family": [each.pid for each in family],
        "address": ray.get_runtime_context().gcs_address, **environment,
        "store": ray.cluster_resources()["object_store_memory"],
    }), flush=True)
    sys.stdin.readline()
print(json.dumps({"left": [each.pid for each in psutil.Process().children(recursive=True)],
                  "auth": os.environ.get("RAY_AUTH_MODE")}), flush=True)
"""

STRANGER = """
import sys
import ray
try:
    ray.init(address=sys.argv[1], logging_level="CRITICAL", log_to_driver=False)
except BaseException as error:
    print(type(error).__name__)
else:
    print("let in")
"""


def start_owner() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read(owner: "subprocess.Popen[str]") -> dict[str, object]:
    assert owner.stdout is not None
    return json.loads(owner.stdout.readline())


def test_a_local_cluster_is_private_and_leaves_nothing() -> None:
    with start_owner() as owner:
        facts = read(owner)
        assert facts["cwd"] == os.getcwd()
        assert facts["store"] == 150_000_000
        assert facts["listening"]
        assert {str(ip).removeprefix("::ffff:") for ip in facts["listening"]} <= {
            "127.0.0.1",
            "::1",
        }
        token = Path(str(facts["RAY_AUTH_TOKEN_PATH"]))
        assert facts["RAY_AUTH_MODE"] == "token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.parent.stat().st_mode & 0o777 == 0o700

        other = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, str(facts["address"])],
            env={**other, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "let in" not in stranger.stdout, stranger.stderr

        owner.communicate("\n", timeout=30)
    assert owner.returncode == 0
    assert not [pid for pid in facts["family"] if runs(pid)]
    assert not token.parent.exists()


def test_a_killed_owner_takes_its_cluster_along() -> None:
    with start_owner() as owner:
        facts = read(owner)
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 15
    while left := [pid for pid in facts["family"] if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
