"""The ``rayway`` command: its subcommands, and how an error becomes an exit code.

Exit codes: 0 done, 2 the user's input, 3 no cluster, 4 training failed, 5 storage, 130 stopped.
"""

import gc
import sys

import click

from rayway.cli.checkpoints import checkpoints
from rayway.cli.data import data
from rayway.cli.metrics import metrics
from rayway.cli.resume import resume
from rayway.cli.run import run
from rayway.cli.runs import runs
from rayway.cli.show import show
from rayway.errors import RaywayError, StoppedError
from rayway.telemetry.printable import printable_lines


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rayway")
def rayway() -> None:
    """Train PyTorch models on Ray: same job, same numbers.

    Exit codes: 0 done, 2 the input is wrong, 3 no cluster, 4 training failed, 5 storage,
    130 stopped.
    """


for command in (run, resume, runs, show, metrics, checkpoints, data):
    rayway.add_command(command)


def main() -> None:
    """Run the command line; errors that rayway raises on purpose end in one message."""
    try:
        _run()
    finally:
        gc.freeze()  # else the interpreter takes torch and Ray apart, object by object: most of 1 s


def _run() -> None:
    try:
        rayway(standalone_mode=False)
    except RaywayError as error:
        print(f"rayway: {printable_lines(str(error))}", file=sys.stderr)  # noqa: T201 - the one place that prints errors
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        print("rayway: interrupted", file=sys.stderr)  # noqa: T201 - as above
        sys.exit(StoppedError.exit_code)
