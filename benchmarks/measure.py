"""What all benchmarks share: figures with their spread, the machine they were taken on, the JSON.

A figure is the median over repeats, with all repeats beside it. The claims are ratios of two things
measured in turn, in one session: a busy machine slows both, and the order alternates.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil


def spread(values: Sequence[float], *, digits: int = 4) -> dict[str, Any]:
    """Return median, smallest and largest of ``values``, and the values in the order taken."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "repeats": [round(value, digits) for value in values],
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on; ``load`` above ``cpus`` says that they are noisy."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 1),
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, rayway and the packages named."""
    found = {name: importlib.metadata.version(name) for name in ("rayway", *packages)}
    return {"python": platform.python_version(), **found}


def report(name: str, *, method: str, packages: Sequence[str], **figures: Any) -> None:
    """Print a benchmark's result to stdout, as one JSON object."""
    result = {
        "benchmark": name,
        "method": method,
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(*packages),
        **figures,
    }
    print(json.dumps(result, indent=2))


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
