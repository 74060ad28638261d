"""The goals of data_rate.py, judged from its figures."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from measure import spread

Figures = dict[str, float]
Found = Mapping[str, Mapping[str, Sequence[Figures]]]
"""Setting, as ``store/data/consumers`` -> case -> figures of each round."""
_LOCAL, _RAY = "rayway local", "rayway ray"


def judged(found: Found) -> dict[str, Any]:
    """Return each goal with what was found in each setting; the worst decides."""
    goals: dict[str, Any] = {}
    for text, (least, most, values) in _goals(found).items():
        medians = [statistics.median(each) for each in values.values()]
        goals[text] = {
            "met": all(
                (least is None or value >= least) and (most is None or value <= most)
                for value in medians
            )
            if medians
            else None,
            "found": {setting: spread(each) for setting, each in values.items()},
        }
    return goals


_Goal = tuple[float | None, float | None, dict[str, list[float]]]


def _goals(found: Found) -> dict[str, _Goal]:
    """Return text -> (least, most, values of each setting)."""

    def over(
        ours: str, theirs: str, key: str, *, stores: str = "disk s3", upside: bool = True
    ) -> dict[str, list[float]]:
        """Return ours over theirs, or theirs over ours where less is better, round by round."""
        return {
            setting: [
                a[key] / b[key] if upside else b[key] / a[key]
                for a, b in zip(cases[ours], cases[theirs], strict=False)
            ]
            for setting, cases in found.items()
            if setting.partition("/")[0] in stores.split() and ours in cases and theirs in cases
        }

    def each(name: str, key: str, stores: str = "disk s3") -> dict[str, list[float]]:
        return {
            setting: [figures[key] for figures in cases[name]]
            for setting, cases in found.items()
            if setting.partition("/")[0] in stores.split() and name in cases
        }

    def cpu(theirs: str) -> dict[str, list[float]]:
        return over(_LOCAL, theirs, "cpu_s_per_million", stores="disk", upside=False)

    return {
        "local: rows per CPU second over raw >= 0.5": (0.5, None, cpu("raw")),
        "local: the same over raw pool, that is raw with its rows shuffled >= 0.5": (
            0.5,
            None,
            cpu("raw pool"),
        ),
        "local: rows per CPU second over LitData >= 5": (5, None, cpu("LitData")),
        "local: rows per CPU second over Ray Data >= 10": (10, None, cpu("Ray Data")),
        "local: rows per CPU second over HF datasets >= 50": (50, None, cpu("HF datasets")),
        "local: rows per CPU second over MosaicML >= 50": (50, None, cpu("MosaicML Streaming")),
        "local: first batch <= 0.5 s": (None, 0.5, each(_LOCAL, "first_batch_s")),
        "local: memory of a consumer <= 300 MB": (None, 300, each(_LOCAL, "memory_mb")),
        "local: 2 consumers >= 1.9 of one, a core each": (
            1.9,
            None,
            _scaling(found, f"{_LOCAL}, a core each"),
        ),
        "raw: the same, for comparison": (None, None, _scaling(found, "raw, a core each")),
        "local: S3 rows per second over raw GETs >= 0.6": (
            0.6,
            None,
            over(_LOCAL, "raw gets", "rows_per_s", stores="s3"),
        ),
        "ray: rows per second over Ray Data's >= 1": (
            1,
            None,
            over(_RAY, "Ray Data", "rows_per_s"),
        ),
        "ray: first batch over Ray Data's <= 0.3": (
            None,
            0.3,
            over(_RAY, "Ray Data", "first_batch_s"),
        ),
    }


def _scaling(found: Found, name: str) -> dict[str, list[float]]:
    """Return rows per second of two consumers over those of one, round by round."""
    pairs = {
        setting: (found[setting.removesuffix("/2") + "/1"], cases)
        for setting, cases in found.items()
        if setting.endswith("/2") and setting.removesuffix("/2") + "/1" in found
    }
    return {
        setting: [
            two["rows_per_s"] / one["rows_per_s"]
            for one, two in zip(ones[name], twos[name], strict=False)
        ]
        for setting, (ones, twos) in pairs.items()
        if name in ones and name in twos
    }
