"""Figures said as sentences."""

from collections.abc import Mapping

from rayway.units import format_duration

_ACTIVITIES = {
    "step": "computing",
    "data_wait": "waiting for data",
    "save": "saving checkpoints",
    "evaluate": "evaluating",
    "setup": "starting up",
    "log": "logging",
}

_ADVICE = {
    "data_wait": "Data is the bottleneck.",
    "save": "Saving is the bottleneck; a larger checkpoint.every_steps helps.",
    "evaluate": "Evaluating costs much; a larger evaluate.every_steps helps.",
    "setup": "Start-up weighs much; a longer run uses the machines better.",
}

BOTTLENECK = 0.25
"""From this share of the time on, something other than computing is worth a remark."""


def shares(clock: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return where the time went as (activity, seconds, share of all), the largest first.

    Args:
        clock: Seconds by name, as in ``data_wait_s``. ``total_s``, if there, is all the time; what
            the others do not cover is then called ``the rest``.
    """
    parts = {name: s for name, s in clock.items() if name != "total_s" and s > 0}
    counted = sum(parts.values())
    total = max(clock.get("total_s", counted), counted)
    if not total > 0:
        return []
    named = [(name.removesuffix("_s"), s) for name, s in parts.items()]
    if total - counted > 0.005 * total:
        named.append(("the rest", total - counted))
    found = [(name, s, s / total) for name, s in named]
    return sorted(found, key=lambda part: -part[1])


def time_sentence(clock: Mapping[str, float], data: Mapping[str, object] = {}) -> str | None:
    """Return where the time went in a sentence, with a remark if it did not go into computing.

    None if nothing was measured. Parts below 1 % are left out.

    Args:
        clock: Seconds by name, as in ``data_wait_s``.
        data: What a run records of its feed: the slowest stage and what to do about it.
    """
    parts = shares(clock)
    if not parts:
        return None
    total = format_duration(sum(s for _, s, _ in parts))
    told = [f"{_percent(share)} {_activity(name)}" for name, _, share in parts if share >= 0.01]
    sentence = f"Of {total}, {_and(told)}."
    large = [name for name, _, share in parts if share >= BOTTLENECK]
    advice = [_ADVICE[name] for name in large if name in _ADVICE]
    if "data_wait" in large and data.get("slowest"):
        advice.append(f"Most of the readers' time goes into {data['slowest']}. {data['advice']}")
    return " ".join([sentence, *advice])


def _activity(name: str) -> str:
    return _ACTIVITIES.get(name, name.replace("_", " "))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def lower_is_better(metric: str) -> bool:
    """Return whether a metric of this name is better when small, e.g. ``loss`` or ``rmse``."""
    words = metric.lower().replace("-", "_").replace("/", "_").split("_")
    small = {"loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "nll", "wer", "cer"}
    return not small.isdisjoint(words)
