"""The data of a run as it was when the run began: the indexes in its folder.

The order of the samples is made from them, so they are written once, before the first attempt, and
a resume compares them with what lies there now.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rayway.data.check import Finding, check_cheap, refuse
from rayway.data.index import Index
from rayway.data.plan import Plan
from rayway.errors import DataError
from rayway.spec.job import DataSpec, Job
from rayway.spec.own import OwnSpec
from rayway.storage.runs import DATA_KEY, RunFolder, index_key

_SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run trains and evaluates on."""

    train: tuple[Index, ...]
    """An index for each place that the job names, in the job's order."""

    validation: Index | None = None

    @property
    def all(self) -> list[Index]:
        """All indexes, those of the training data first."""
        return [*self.train, *([] if self.validation is None else [self.validation])]


def write_run_data(folder: RunFolder, data: RunData) -> None:
    """Store the indexes in the run folder. ``data.json`` goes last: it makes them exist."""
    for number, index in enumerate(data.train):
        folder.objects.put(index_key(f"train-{number}"), index.to_bytes())
    if data.validation is not None:
        folder.objects.put(index_key("validation"), data.validation.to_bytes())
    record = {
        "schema_version": _SCHEMA_VERSION,
        "train": [_facts(index) for index in data.train],
        "validation": None if data.validation is None else _facts(data.validation),
    }
    folder.objects.put(DATA_KEY, json.dumps(record, indent=2).encode())


def read_run_data(folder: RunFolder) -> RunData:
    """Return the indexes that :func:`write_run_data` stored.

    Raises:
        DataError: They are damaged, or of another version.
    """
    record = json.loads(folder.objects.get(DATA_KEY))
    if record.get("schema_version") != _SCHEMA_VERSION:
        raise DataError(
            f"{DATA_KEY} of this run has schema_version={record.get('schema_version')}; this "
            f"rayway reads {_SCHEMA_VERSION}. Use the rayway that wrote it, or start a new run."
        )
    keys = [index_key(f"train-{number}") for number in range(len(record["train"]))]
    facts = [*record["train"]]
    if record["validation"] is not None:
        keys.append(index_key("validation"))
        facts.append(record["validation"])
    found = [Index.from_bytes(folder.objects.get(key)) for key in keys]
    for key, index, fact in zip(keys, found, facts, strict=True):
        if index.fingerprint != fact["fingerprint"]:
            raise DataError(
                f"{key} of this run is not the index that {DATA_KEY} names: fingerprint "
                f"{index.fingerprint}, and {fact['fingerprint']} is expected. Restore the run's "
                f"folder, or start a new run."
            )
    train = tuple(found[: len(record["train"])])
    return RunData(train=train, validation=None if len(found) == len(train) else found[-1])


def check_run_data(folder: RunFolder) -> None:
    """Refuse data that is not what the run began with.

    Raises:
        DataError: A shard changed, is missing or was added; it is named.
    """
    for index in read_run_data(folder).all:
        index.check_unchanged()


def check_fit(spec: Job | OwnSpec, data: RunData, plan: Plan, *, workers: int) -> list[str]:
    """Refuse data that cannot be trained on, as far as that is seen without reading it all.

    Args:
        spec: What is trained.
        data: The indexes.
        plan: The order of the training samples.
        workers: Processes that read.

    Returns:
        Advice: what is not good and does not hinder.

    Raises:
        DataError: It tells all that hinders.
    """
    findings: list[Finding] = []
    everything = spec.data.cover == "all"
    batches = [1 if everything else stream.batch for stream in plan.streams]
    for index, batch in zip(data.all, [*batches, 1], strict=False):
        findings += check_cheap(
            index,
            global_batch=batch,
            transform=spec.data.transform is not None,
            invalid=spec.data.invalid,
            pad=spec.data.pad,
            workers=workers,
        )
    return refuse(findings)


def check_alike(indexes: Sequence[Index], spec: DataSpec) -> None:
    """Refuse a mixture whose places do not have the same columns.

    Raises:
        DataError: A column is missing in one place or is of another type there.
    """
    first = indexes[0]
    for other in indexes[1:]:
        for name in dict.fromkeys([*first.schema.names, *other.schema.names]):
            kinds = [
                str(each.schema.field(name).type) if name in each.schema.names else "missing"
                for each in (first, other)
            ]
            if kinds[0] != kinds[1]:
                chosen = "choose columns that agree with data.columns"
                if spec.columns is not None:
                    chosen = "leave it out of data.columns"
                raise DataError(
                    f"column {name!r} is {kinds[1]} in {other.root} but {kinds[0]} in "
                    f"{first.root}, and data.train mixes both. Write them alike, or {chosen}."
                )


def _facts(index: Index) -> dict[str, object]:
    return {"root": index.root, "fingerprint": index.fingerprint, "rows": index.total}
