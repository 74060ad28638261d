"""Taking an attempt of an own loop's run: the folder, the data and who else is there.

This is to the loop of a script what ``launch/fit.py`` is to a job, less the workers: the script was
started by its user, who starts it again.
"""

import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rayway.data.index import build_index
from rayway.errors import DataError
from rayway.spec.own import OwnSpec, check_same_loop, own_to_json
from rayway.storage.objects import Objects
from rayway.storage.runs import DATA_KEY, JOB_KEY, RUN_KEY, STOP_KEY, RunFolder, attempt_key
from rayway.telemetry.alive import sign_of_life
from rayway.train.course import count_steps, plan_training
from rayway.train.ranks import dp_size
from rayway.train.run_data import RunData, check_alike, check_fit, read_run_data, write_run_data
from rayway.train.watch import refuse_running


def take_attempt(spec: OwnSpec, at: str) -> int:
    """Begin a new attempt, once all is checked, and return its number.

    Args:
        spec: The loop as the script has it now.
        at: The run's folder, a path or URL; made if it is not there.

    Returns:
        The number; that of a run that is finished is negative: it gets no new attempt.

    Raises:
        SpecError: The run is another one, or is still running.
        DataError: The data is missing, unreadable, or not what it was.
        StorageError: The folder cannot be written.
    """
    train = tuple(build_index(place, columns=spec.data.columns) for place in spec.data.sources)
    check_alike(train, spec.data)
    plan = plan_training(spec, train)  # refuses data that fills no batch
    check_fit(spec, RunData(train=train), plan, workers=dp_size())
    steps = count_steps(spec, plan)
    folder = _run_folder(spec, at)
    newest = folder.newest_attempt()
    end = folder.read(attempt_key(newest, "end.json")) if newest else None
    if end is None and newest:
        refuse_running(folder, newest)
    _keep_data(folder, RunData(train=train))
    finished = end is not None and end.get("state") == "FINISHED" and end.get("step")
    if isinstance(finished, int) and finished >= steps:
        return -newest
    folder.objects.delete([STOP_KEY])
    return folder.next_attempt(
        {
            "workers": dp_size(),
            "started_at": time.time(),
            "python": platform.python_version(),
            "rayway": version("rayway"),
            **sign_of_life(),
        }
    )


def _run_folder(spec: OwnSpec, at: str) -> RunFolder:
    """Return the run's folder: the one that is there if it fits, else a new one."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    text = own_to_json(spec, script=Path(main).resolve() if main else None)
    objects = Objects(at)
    if objects.exists(JOB_KEY):
        folder = RunFolder.open(objects)
        check_same_loop(spec, folder.job_json(), url=folder.url)
        return folder
    objects.probe()
    if not objects.exists(RUN_KEY):
        return RunFolder.create(objects, text, now=datetime.now(UTC))
    objects.put(JOB_KEY, text.encode())  # a script was killed between the two
    return RunFolder.open(objects)


def _keep_data(folder: RunFolder, data: RunData) -> None:
    """Store the indexes of the data, or refuse data that is not what the run began with."""
    if folder.objects.exists(DATA_KEY):
        began = read_run_data(folder).train
        if len(began) != len(data.train):
            raise DataError(
                f"this run began with {len(began)} place(s) of training data and the script now "
                f"names {len(data.train)}. Put them back to go on, or give the loop another folder."
            )
        for before, now in zip(began, data.train, strict=True):
            if before.fingerprint != now.fingerprint:
                if before.root == now.root:
                    before.check_unchanged()
                raise DataError(
                    f"{now.root} does not hold the data that this run began with, from "
                    f"{before.root}. Put the data back to go on, or give the loop another folder."
                )
    write_run_data(folder, data)
