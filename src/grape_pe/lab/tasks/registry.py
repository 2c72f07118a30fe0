"""Probes by name: `build_task("flip-flop", ignore=0.9)` or `build_task("mqar[length=128,pairs=8]")`."""

from __future__ import annotations

import difflib
from typing import Any

from ..config import checked
from ..errors import LabError
from ..written import read_name
from .base import Task
from .copying import Copy, Reverse, SelectiveCopy, Sort
from .counting import Count
from .flip_flop import FlipFlop
from .passkey import Passkey
from .recall import NBack, Recall
from .words import A5, S5, Parity

_ALL: tuple[type[Task], ...] = (
    FlipFlop, Recall, NBack, Copy, Reverse, SelectiveCopy, Sort, Count, Parity, A5, S5, Passkey,
)  # fmt: skip
TASKS: dict[str, type[Task]] = {task.name: task for task in _ALL}


def names() -> list[str]:
    """Every probe `build_task` knows."""
    return list(TASKS)


def build_task(name: str, **options: Any) -> Task:
    """A probe by name.

    Options in brackets after the name come before those given as keywords.

    Args:
        name: one of `names()`, optionally with options in brackets, as in "mqar[pairs=4]".
        options: fields of the probe's class, such as length, shortest or pairs.
    """
    name, written = read_name(name)
    options |= written
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose {', '.join(TASKS)}"
        raise LabError(f"unknown task {name!r}; {hint}")
    try:
        return checked(TASKS[name], options, list(TASKS[name].model_fields))
    except LabError as problem:
        raise LabError(f"{name}: {problem}") from None
