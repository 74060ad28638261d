"""Print text that a run of ``stdlib_lm.py`` writes: ``python jobs/sample.py RUN --prompt "def "``.

The text goes to stdout, all else to stderr. Exits 0, or as ``rayway`` does: 2 if there is no such
run or it trained another kind of model, 5 if it holds no checkpoint that can be read.
"""

import argparse
import sys

import torch
from torch import Tensor

from models.gpt import GPT
from rayway.checkpoint.store import CheckpointStore
from rayway.errors import CheckpointError, RaywayError, SpecError
from rayway.spec.load import import_object, job_from_json
from rayway.storage.runs import RunFolder, find_run

BUILD = "models.gpt:build"
END_OF_FILE = 0  # between two files of the training data, so also what a file begins after


def main() -> int:
    """Load the run's newest checkpoint and print what it makes of the prompt."""
    parser = argparse.ArgumentParser(description="Print text that a trained byte-level GPT writes.")
    parser.add_argument("run", help="run id, or path or URL of a run folder")
    parser.add_argument("--prompt", default="", help="what the text begins with (default: a file)")
    parser.add_argument("--bytes", type=int, default=400, help="most bytes to write (default: 400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is the likeliest byte")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")
    parser.add_argument("--storage", default="./runs", help="where run ids are looked up")
    asked = parser.parse_args()
    try:
        model = load_model(find_run(asked.run, asked.storage))
    except RaywayError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    torch.manual_seed(asked.seed)
    written = write_on(
        model, asked.prompt.encode(), count=asked.bytes, temperature=asked.temperature
    )
    print(printable(asked.prompt.encode() + written))
    return 0


def load_model(folder: RunFolder) -> GPT:
    """Return the model of a run's newest checkpoint, on the CPU, ready to write.

    Raises:
        SpecError: The run trained something else than the GPT.
        CheckpointError: It has no checkpoint yet, or none that is whole.
    """
    job = job_from_json(folder.job_json()).job
    if job.model.build != BUILD:
        raise SpecError(
            f"run {folder.run_id} trained {job.model.build}, but sample.py needs {BUILD}. Name "
            " a run of jobs/stdlib_lm.py."
        )
    store = CheckpointStore(folder, attempt=0, is_newest_attempt=lambda: False)  # only to read
    loaded = store.load_newest(on_skip=lambda reason: print(reason, file=sys.stderr))
    if loaded is None:
        raise CheckpointError(
            f"run {folder.run_id} has no checkpoint yet. Wait for its first, which is saved after "
            f"step {job.checkpoint.every_steps or 'the last'}."
        )
    print(f"{folder.run_id}, step {loaded.step}", file=sys.stderr)
    model: GPT = import_object(job.model.build)(**job.model.args)
    model.load_state_dict(dict(loaded.tensors["model"]))
    return model.eval()


@torch.no_grad()
def write_on(model: GPT, prompt: bytes, *, count: int, temperature: float) -> bytes:
    """Return up to ``count`` bytes that the model puts behind ``prompt``; fewer if a file ends.

    Args:
        model: The GPT, in evaluation mode. It looks back on its ``seq_len`` newest bytes.
        prompt: What was written so far. Empty: the beginning of a file.
        count: Most bytes to write.
        temperature: Scores are divided by it before a byte is drawn from torch's generator.
            0: always the likeliest byte.
    """
    seen = list(prompt) or [END_OF_FILE]
    start = len(seen)
    while len(seen) < start + count:
        scores: Tensor = model(torch.tensor([seen[-model.seq_len :]]))[0, -1]
        following = scores.argmax()
        if temperature:
            following = torch.multinomial((scores / temperature).softmax(dim=0), 1)
        if following.item() == END_OF_FILE:
            break
        seen.append(int(following.item()))
    return bytes(seen[start:])


def printable(text: bytes) -> str:
    """Return text without what a terminal would obey, such as the beginnings of commands to it."""
    characters = text.decode(errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters
    )


if __name__ == "__main__":
    sys.exit(main())
