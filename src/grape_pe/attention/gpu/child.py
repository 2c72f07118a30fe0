"""Runs a check in a child process: survives its crash, its hang and whatever it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .store import Tiles

#: seconds the child may take: most of them are spent by Triton's compiler
LIMIT = 300.0
#: sent by somebody else, so they say nothing of the kernels
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True)
class Verdict:
    """Result of one check, or of the timing of tiles.

    `errors` has for the output and each gradient the relative error against float64, that of the dense
    computation in the same dtype, and what is allowed. `repeatable`: the same bits when repeated.
    `conclusive` is False when the check could not run (no memory left, say): such a verdict is not stored.
    `times` are median seconds by kernel and tile, where tiles were timed; `tiles` are those kept.
    """

    ok: bool
    reason: str | None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    repeatable: bool = True
    seconds: float = 0.0
    conclusive: bool = True
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    tiles: Tiles = field(default_factory=dict)


def verdict_from(found: dict[str, Any]) -> Verdict:
    """Verdict from JSON; ValueError, TypeError or KeyError where something is missing or of another type."""
    verdict = Verdict(**found)
    parts = (verdict.errors, verdict.times, verdict.tiles)
    if not isinstance(verdict.ok, bool) or not all(isinstance(x, dict) for x in parts):
        raise TypeError("not a verdict")
    if not verdict.ok and not isinstance(verdict.reason, str):
        raise TypeError("a failure without a reason")
    return verdict


def command() -> list[str]:
    return [sys.executable, "-P", "-m", "grape_pe.attention.gpu.check"]


def run(description: dict[str, Any]) -> Verdict:
    """Start the child with `description` as JSON on its standard input, and read the verdict it prints.

    Through files: a process that the child leaves behind would keep a pipe open.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(json.dumps({**description, "limit": LIMIT}).encode())
        given.seek(0)
        try:
            child = subprocess.Popen(
                command(), stdin=given, stdout=out, stderr=err, env=_environment(), start_new_session=True
            )
        except OSError as problem:
            return Verdict(False, f"the check could not start: {problem}", conclusive=False)
        code = _wait(child)
        out.seek(0)
        err.seek(0)
        verdict = _read(
            code, *(file.read().decode(errors="replace").strip().splitlines() for file in (out, err))
        )
    return replace(verdict, seconds=time.monotonic() - start)


def _environment() -> dict[str, str]:
    """Ours, with this very package first on the path."""
    path = filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")))
    return {**os.environ, "GRAPE_TRITON": "on", "PYTHONPATH": os.pathsep.join(path)}


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    """The exit code, or None for a child that did not end; its whole process group is ended then."""
    try:
        return child.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:  # one that is stuck in the driver may not die: wait no longer for it
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if os.name == "posix":
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
                child.wait(5)


def _read(code: int | None, out: list[str], err: list[str]) -> Verdict:
    if code is not None and code >= 0:
        try:
            return verdict_from(json.loads(out[-1]))
        except (ValueError, TypeError, KeyError, IndexError):
            last = f": {err[-1][:300]}" if err else ""
            return Verdict(False, f"it ended with code {code} and no readable result{last}", conclusive=False)
    names = {number.value: number.name for number in signal.Signals}
    name = "SIGALRM" if code is None else names.get(-code, f"signal {-code}")
    if name == "SIGALRM":  # the child's own clock, see check.main
        return Verdict(False, f"it did not end within {LIMIT:g} seconds")
    return Verdict(False, f"it ended with {name}", conclusive=name not in FROM_OUTSIDE)
