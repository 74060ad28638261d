"""The nearest valid key for a key that does not exist, or stands in the wrong place."""

from collections.abc import Iterable
from difflib import get_close_matches

SYNONYMS = {
    "accumulate": "batch.micro_batch",
    "accumulate_grad_batches": "batch.micro_batch",
    "accumulation": "batch.micro_batch",
    "accumulation_steps": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.micro_batch",
    "batch_size": "batch.global_batch",
    "total_batch_size": "batch.global_batch",
    "effective_batch_size": "batch.global_batch",
    "micro_batch_size": "batch.micro_batch",
    "per_device_batch_size": "batch.micro_batch",
    "per_device_train_batch_size": "batch.micro_batch",
    "dataset": "data.train",
    "train_data": "data.train",
    "train_path": "data.train",
    "val_data": "data.validation",
    "validation_data": "data.validation",
    "drop_last": "data.cover",
    "features": "data.columns",
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "beta1": "optim.betas",
    "beta2": "optim.betas",
    "clip_grad_norm": "optim.max_norm",
    "grad_clip": "optim.max_norm",
    "gradient_clip_val": "optim.max_norm",
    "max_grad_norm": "optim.max_norm",
    "lr_scheduler": "optim.schedule",
    "scheduler": "optim.schedule",
    "min_lr": "optim.final_lr_fraction",
    "warmup": "optim.warmup_steps",
    "wd": "optim.weight_decay",
    "max_epochs": "optim.epochs",
    "n_epochs": "optim.epochs",
    "num_epochs": "optim.epochs",
    "num_train_epochs": "optim.epochs",
    "max_steps": "optim.steps",
    "num_steps": "optim.steps",
    "total_steps": "optim.steps",
    "train_steps": "optim.steps",
    "eval_every": "evaluate.every_steps",
    "eval_steps": "evaluate.every_steps",
    "eval_batch_size": "evaluate.micro_batch",
    "ckpt_every": "checkpoint.every_steps",
    "save_every": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "cpus": "scale.cpus_per_worker",
    "num_cpus": "scale.cpus_per_worker",
    "gpus": "scale.gpus_per_worker",
    "num_gpus": "scale.gpus_per_worker",
    "use_gpu": "scale.gpus_per_worker",
    "max_failures": "scale.max_attempts",
    "retries": "scale.max_attempts",
    "num_workers": "scale.workers",
    "world_size": "scale.workers",
    "n_gpus": "scale.workers",
    "timeout": "scale.step_timeout_s",
    "network": "model.build",
    "model_args": "model.args",
    "model_kwargs": "model.args",
    "criterion": "loss",
    "loss_fn": "loss",
    "amp": "precision",
    "dtype": "precision",
    "mixed_precision": "precision",
    "random_seed": "seed",
    "job_name": "name",
    "run_name": "name",
}
"""What other tools call a field, and where rayway keeps it."""


def nearest(word: str, words: Iterable[str], *, count: int = 3) -> list[str]:
    """Return up to ``count`` words that look like ``word``, the nearest first."""
    return get_close_matches(word, list(words), n=count, cutoff=0.6)


def unknown_key(key: str, *, place: str, fields: Iterable[str]) -> tuple[str, list[str]]:
    """Say what is wrong with a key that its place does not have.

    Args:
        key: What the user wrote, e.g. ``learning_rte``.
        place: The section it stands in, e.g. ``optim``; empty for the top level.
        fields: All fields of a job, dotted, e.g. ``optim.lr``.

    Returns:
        A sentence with the nearest valid key, and those valid keys themselves.
    """
    known = list(fields)
    dotted = f"{place}.{key}" if place else key
    here = f"in {place}" if place else "at the top level"
    owned = [field for field in known if field.rpartition(".")[0] == place]
    elsewhere = [field for field in known if field.rpartition(".")[2] == key and field != dotted]
    if key in SYNONYMS:
        return f"unknown key {dotted}; rayway calls it {SYNONYMS[key]}.", [SYNONYMS[key]]
    if "." in key and key in known:  # as --set takes it
        return f"{key} is not a key {here}; write it nested, one level per dot.", [key]
    if elsewhere:
        right = " or ".join(elsewhere)
        return f"key {key} does not belong {here}; its place is {right}.", elsewhere
    close = _closest(key, owned, known)
    if close:
        return f"unknown key {dotted}; the nearest valid key is {close}.", [close]
    names = ", ".join(field.rpartition(".")[2] for field in owned)
    return f"unknown key {dotted}; the valid keys {here} are {names}.", []


def _closest(key: str, owned: list[str], known: list[str]) -> str | None:
    """Look in the key's own section first, then among all fields and what others call them."""
    own = {field.rpartition(".")[2]: field for field in owned}
    far = {**SYNONYMS, **{field.rpartition(".")[2]: field for field in known}}
    for names in (own, far):
        words = nearest(key, names, count=1)
        if words:
            return names[words[0]]
    return None
