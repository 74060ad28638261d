"""What is said when a run has ended, and with which code the command exits."""

import shlex
import sys

from rayway.errors import StoppedError
from rayway.report.facts import read_run
from rayway.report.pages import summary
from rayway.report.paper import print_page
from rayway.storage.runs import RunFolder

DEFAULT_STORAGE = "./runs"


def report_ending(url: str, *, state: str, storage: str) -> int:
    """Print a run's summary to stderr and return the exit code of its state."""
    facts = read_run(RunFolder.open(url))
    where = "" if storage == DEFAULT_STORAGE else f" --storage {shlex.quote(storage)}"
    if state != "FINISHED":
        go_on = f"rayway resume {facts.run_id}{where}"
        print(f"Stopped after step {facts.step}. Go on with: {go_on}", file=sys.stderr)  # noqa: T201
    print_page(summary(facts, see=f"rayway show {facts.run_id}{where}"), sys.stderr)
    return 0 if state == "FINISHED" else StoppedError.exit_code
