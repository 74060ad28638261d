"""Claim: data comes at half the speed of a raw scan per CPU second, far ahead of other tools.

``python benchmarks/data_rate.py --peers-python PEERS/bin/python`` compares with all of them; see
``requirements-peers.txt``. A round of all cases takes some 15 minutes on two quiet cores.
"""

import argparse
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from data_consumer import Asked
from data_goals import Figures, judged
from data_sets import MAKERS, link_copies, make_set
from measure import note, report, spread
from start_up import adopt_orphans

BENCHMARKS = Path(__file__).parent
PEERS = ("datasets", "litdata", "mosaicml-streaming", "webdataset", "torch", "pyarrow", "numpy")
METHOD = """\
Every consumer is a process with one torch thread that takes shuffled batches of 256 rows as \
torch tensors and looks at each row. All of a case's processes import what they need and then \
begin together. rows_per_s and cpu_s_per_million: from then to the last batch, opening the data \
included; CPU of all processes of the tool. after_first: the same without the time until the \
first batch, which flatters tools that read far ahead before it. A consumer goes on for at least \
3 and at most 8 seconds after its first batch; the Ray cases read 4 epochs whole, on a cluster \
that is up. memory_mb: the most private and shared memory, sampled, above that after the \
imports, for each consumer; file pages that the system may drop are not in it. of_raw: rows per \
CPU second over those of `raw` in the same round, pyarrow decoding row groups in shuffled order, \
none of whose rows is moved; `raw pool` also gathers the rows of 8 row groups at a time into \
shuffled batches. `a core each` binds every consumer to a core of its own. Rounds run all cases \
in turn, every second one backwards. s3 is a server on the same machine that waits before each \
answer; its CPU is not counted. tokens: 300,032 rows of 129 int32 as uncompressed fixed-size \
binary; tokens_list: the same as lists, snappy; images: 50,048 rows of 3072 bytes and a label."""
_READY_S, _CASE_S = 120.0, 240.0
_EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tool in one way of use."""

    script: str
    how: str = ""
    peer: bool = False
    """It runs in the peers' environment and reads a format of its own."""
    one_process: bool = False
    """One process stands for all consumers."""
    core_each: bool = False
    stores: tuple[str, ...] = ("disk", "s3")

    def runs_on(self, setting: "Setting") -> bool:
        """Tell whether the case has anything to show there; peers have one format for tokens."""
        return setting.store in self.stores and not (self.peer and setting.data == "tokens_list")


CASES = {
    "raw": Case(script="pyarrow"),
    "raw gets": Case(script="pyarrow", how="gets", stores=("s3",)),
    "raw pool": Case(script="pyarrow", how="pool", stores=("disk",)),
    "raw, a core each": Case(script="pyarrow", core_each=True, stores=("disk",)),
    "rayway local": Case(script="rayway"),
    "rayway local, a core each": Case(script="rayway", core_each=True, stores=("disk",)),
    "torch DataLoader, 0 workers": Case(script="torch", how="0"),
    "torch DataLoader, 1 worker": Case(script="torch", how="1"),
    "LitData": Case(script="litdata", peer=True),
    "WebDataset": Case(script="webdataset", peer=True),
    "HF datasets": Case(script="hf", peer=True),
    "MosaicML Streaming": Case(script="mds", peer=True),
    "rayway ray": Case(script="ray", how="rayway", one_process=True),
    "Ray Data": Case(script="ray", how="data", one_process=True),
}


@dataclass(frozen=True, order=True)
class Setting:
    """What a case runs on."""

    store: str
    data: str
    consumers: int

    def __str__(self) -> str:
        return f"{self.store}/{self.data}/{self.consumers}"


class RefusedError(Exception):
    """A tool did not do what it was asked; the text ends with its own words."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where things lie, and how long a case runs."""

    folder: Path
    peers_python: str | None
    endpoint: str
    server_pid: int
    rows: dict[str, int]
    least_s: float
    most_s: float

    def run(self, case: Case, setting: Setting) -> Figures:
        """Run a case once.

        Raises:
            RefusedError: It failed, or was not through in time.
        """
        with tempfile.TemporaryDirectory(prefix="dr-", ignore_cleanup_errors=True) as scratch:
            self._convert(case, setting, scratch)
            asked = self._asked(case, setting, scratch)
            count = 1 if case.one_process else setting.consumers
            with ExitStack() as stack:
                stack.callback(self._end_case)
                port = 20_000 + os.getpid() % 10_000 + int(time.time()) % 1000
                processes = [
                    self._start(case, {**asked, "rank": rank}, Path(scratch), port)
                    for rank in range(count)
                ]
                for rank, process in enumerate(processes):
                    _line(process, _READY_S, Path(scratch) / f"{rank}.err")
                with sampled_memory(processes, each_s=1.0 if case.one_process else 0.2) as memory:
                    for process in processes:
                        assert process.stdin is not None
                        process.stdin.write("go\n")
                        process.stdin.flush()
                    taken: list[dict[str, float]] = []
                    for rank, process in enumerate(processes):
                        taken += json.loads(_line(process, _CASE_S, Path(scratch) / f"{rank}.err"))
                for process in processes:
                    process.wait(30)
        return _figures(taken, memory, shared=case.one_process)

    def _end_case(self) -> None:
        """End all that a case left behind, which became ours; not the store."""
        left = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.pid != self.server_pid
        ]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def _asked(self, case: Case, setting: Setting, scratch: str) -> dict[str, Any]:
        base = "s3://" if setting.store == "s3" else f"{self.folder}/"
        own = f"{base}own/{_own_name(case, setting)}"
        if not case.peer:
            own = f"{scratch}/index.parquet"
        whole = _EPOCHS * self.rows[setting.data] // setting.consumers
        asked = Asked(
            source=f"{base}sets/{setting.data}",
            own=own,
            scratch=scratch,
            images=setting.data == "images",
            world=setting.consumers,
            rows=whole if case.one_process else 0,
            least_s=_CASE_S if case.one_process else self.least_s,
            most_s=_CASE_S if case.one_process else self.most_s,
            core_each=case.core_each,
            how=case.how,
        )
        return asdict(asked)

    def _convert(self, case: Case, setting: Setting, scratch: str) -> None:
        """Have the tool write its own format, if it is not there; ours is an index."""
        place, made = self.folder / "own" / _own_name(case, setting), False
        if case.script in ("rayway", "ray"):
            asked = self._asked(case, setting, scratch)
        elif case.peer and not place.exists():
            made = True
            note(f"converting to {place}")
            shutil.rmtree(f"{place}.making", ignore_errors=True)
            asked = self._asked(case, Setting("disk", setting.data, 1), scratch)
            asked["own"] = f"{place}.making"
        else:
            return
        process = self._start(case, {**asked, "convert": True}, Path(scratch), 0)
        process.communicate(timeout=600)
        if process.returncode:
            raise RefusedError(_words(Path(scratch) / "0.err"))
        if made:
            os.rename(f"{place}.making", place)

    def _start(
        self, case: Case, asked: dict[str, Any], scratch: Path, port: int
    ) -> "subprocess.Popen[str]":
        python = self.peers_python if case.peer else sys.executable
        if python is None:
            raise RefusedError("not run: no --peers-python")
        ranks = {"RANK": asked["rank"], "LOCAL_RANK": asked["rank"]}
        worlds = {"WORLD_SIZE": asked["world"], "LOCAL_WORLD_SIZE": asked["world"]}
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            **{name: str(value) for name, value in (ranks | worlds).items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(BENCHMARKS),
            "OMP_NUM_THREADS": "1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "anyone",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HF_HOME": f"{scratch}/hf",
            "HF_HUB_OFFLINE": "1",
            "RAY_worker_niceness": "0",  # as the other cases' processes
        }
        ours = case.script == "rayway"
        script = BENCHMARKS / ("" if ours else "counterparts") / f"data_{case.script}.py"
        with (scratch / f"{asked['rank']}.err").open("w") as errors:
            return subprocess.Popen(
                [python, "-W", "ignore", str(script), json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )


def _own_name(case: Case, setting: Setting) -> str:
    data = "images" if setting.data == "images" else "tokens"
    return f"{case.script}-{data}"


def _line(process: "subprocess.Popen[str]", timeout_s: float, errors: Path) -> str:
    """Return the next line of JSON, or ``ready``, that a consumer prints."""
    assert process.stdout is not None
    end = time.monotonic() + timeout_s
    while True:
        if not select.select([process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
            raise RefusedError(f"not through after {timeout_s:g} s: {_words(errors)}")
        line = process.stdout.readline()
        if not line:
            process.wait(30)
            raise RefusedError(_words(errors) or f"exited {process.returncode}")
        if line.startswith(("[{", "ready")):  # some tools print there
            return line


def _words(errors: Path) -> str:
    """Return the last line of a process's stderr that names an error, or else the last."""
    lines = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1][:400]


@contextmanager
def sampled_memory(
    processes: Sequence["subprocess.Popen[str]"], *, each_s: float
) -> Iterator[list[float]]:
    """Give a list that holds, at the end, the MB that the processes took above the beginning."""
    roots = [psutil.Process(process.pid) for process in processes]
    begin, most, ended = _memory_mb(roots), [0.0], threading.Event()

    def sample() -> None:
        while not ended.wait(each_s):
            most[0] = max(most[0], _memory_mb(roots) - begin)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def _memory_mb(roots: Sequence[psutil.Process]) -> float:
    """Return what processes and all below them hold, shared memory once, file pages not."""
    total_kb = 0
    for root in roots:
        try:
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                with open(f"/proc/{process.pid}/smaps_rollup") as file:
                    lines = [line.split() for line in file]
            except OSError:
                continue  # it has just ended
            total_kb += sum(
                int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:")
            )
    return total_kb / 1000


def _figures(
    taken: Sequence[dict[str, float]], memory: Sequence[float], *, shared: bool
) -> Figures:
    """Return what all consumers took together. ``shared``: their CPU figures are of all."""
    first, end = min(each["first"] for each in taken), max(each["end"] for each in taken)
    rows = sum(each["rows"] for each in taken)
    later = max(rows - sum(each["first_rows"] for each in taken), 1)

    def cpu_s(since: str) -> float:
        if shared:
            return max(each["cpu_end"] for each in taken) - min(each[since] for each in taken)
        return sum(each["cpu_end"] - each[since] for each in taken)

    return {
        "rows": rows,
        "rows_per_s": rows / (end - min(each["go"] for each in taken)),
        "cpu_s_per_million": cpu_s("cpu_go") / rows * 1e6,
        "first_batch_s": max(each["first"] - each["go"] for each in taken),
        "memory_mb": memory[0] / len(taken),
        "after_first_rows_per_s": later / max(end - first, 1e-9),
        "after_first_cpu_s_per_million": cpu_s("cpu_first") / later * 1e6,
    }


@contextmanager
def s3_server(folder: Path, delay_ms: float) -> Iterator[tuple[str, int]]:
    """Serve the folders below ``folder`` as buckets; give the endpoint and the server's process."""
    server = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "slow_s3.py"), str(folder), str(delay_ms)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    with server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}", server.pid
        finally:
            server.kill()


def all_rounds(
    bench: Bench, cases: Sequence[str], settings: Sequence[Setting], rounds: int
) -> tuple[dict[Setting, dict[str, list[Figures]]], dict[str, str]]:
    """Run everything in turn; return the figures, and why which case has none."""
    found: dict[Setting, dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    refused: dict[str, str] = {}
    todo = [(s, c) for s in settings for c in cases if CASES[c].runs_on(s)]
    for number in range(rounds):
        for setting, name in reversed(todo) if number % 2 else todo:
            if f"{setting}: {name}" in refused:
                continue
            try:
                figures = bench.run(CASES[name], setting)
            except RefusedError as error:
                refused[f"{setting}: {name}"] = str(error)
                note(f"{setting}: {name}: refused: {error}")
            else:
                found[setting][name].append(figures)
                note(f"{setting}: {name}: " + " ".join(f"{k} {v:.4g}" for k, v in figures.items()))
    return found, refused


def in_words(found: dict[str, list[Figures]]) -> dict[str, Any]:
    """Return a setting's figures, each with its spread."""
    raws = [each["cpu_s_per_million"] for each in found.get("raw", [])]
    result: dict[str, Any] = {}
    for name, repeats in found.items():
        figures = {key: spread([each[key] for each in repeats]) for key in repeats[0]}
        if len(raws) == len(repeats):
            pairs = zip(raws, repeats, strict=True)
            figures["of_raw"] = spread([raw / each["cpu_s_per_million"] for raw, each in pairs])
        result[name] = figures
    return result


def _peers(python: str | None) -> dict[str, str]:
    if python is None:
        return {}
    code = (
        "import importlib.metadata as m, json\n"
        f"print(json.dumps({{n: m.version(n) for n in {PEERS}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"error": done.stderr[-400:]}


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where data and converted data are kept")
    parser.add_argument("--peers-python", help="of the environment of requirements-peers.txt")
    parser.add_argument("--cases", help=f"comma-separated parts of names out of {list(CASES)}")
    parser.add_argument("--sets", default=",".join(MAKERS), help="[%(default)s]")
    parser.add_argument("--stores", default="disk,s3", help="[%(default)s]")
    parser.add_argument("--consumers", default="1,2", help="[%(default)s]")
    parser.add_argument("--rounds", type=int, help="[3; --quick: 1]")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of S3 [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="tiny data, half a second a case")
    asked = parser.parse_args()
    names = [
        name
        for name in CASES
        if asked.cases is None or any(part in name for part in asked.cases.split(";"))
    ]
    settings = [
        Setting(store, data, consumers)
        for data in asked.sets.split(",")
        for store in asked.stores.split(",")
        for consumers in map(int, asked.consumers.split(","))
    ]
    adopt_orphans()
    shards = 4 if asked.quick else 64
    folder = (asked.folder or Path("data/bench")).resolve()
    (folder / "own").mkdir(parents=True, exist_ok=True)
    rows = {each: make_set(folder / "sets", each, shards=shards) for each in asked.sets.split(",")}
    for each in rows:
        link_copies(folder / "sets", each, _EPOCHS)
    with s3_server(folder, asked.delay_ms) as (endpoint, server_pid):
        bench = Bench(
            folder=folder,
            peers_python=asked.peers_python,
            endpoint=endpoint,
            server_pid=server_pid,
            rows=rows,
            least_s=0.3 if asked.quick else 3.0,
            most_s=1.0 if asked.quick else 8.0,
        )
        rounds = asked.rounds or (1 if asked.quick else 3)
        found, refused = all_rounds(bench, names, settings, rounds)
    report(
        "data_rate",
        method=METHOD,
        packages=["torch", "ray", "pyarrow", "numpy"],
        peers=_peers(asked.peers_python),
        goals=judged({str(setting): cases for setting, cases in found.items()}),
        quick=asked.quick,
        s3_delay_ms=asked.delay_ms,
        figures={str(setting): in_words(cases) for setting, cases in found.items()},
        refused=refused,
    )


if __name__ == "__main__":
    main()
