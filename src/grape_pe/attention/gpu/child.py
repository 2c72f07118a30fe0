"""Runs a check in a child process: survives its crash, its hang and whatever it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

#: seconds the child may take: most of them are spent by Triton's compiler
LIMIT = 300.0
#: sent by somebody else, so they say nothing of the kernels
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True)
class Verdict:
    """Result of one check.

    `errors` has for the output and each gradient the relative error against float64, that of the dense
    computation in the same dtype, and what is allowed. `repeatable`: the same bits when repeated.
    `conclusive` is False when the check could not run (no memory left, say): such a verdict is not stored.
    `times` are median seconds by kernel and tile, where tiles were timed.
    """

    ok: bool
    reason: str | None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    repeatable: bool = True
    seconds: float = 0.0
    conclusive: bool = True
    times: dict[str, dict[str, float]] = field(default_factory=dict)


def verdict_from(found: dict[str, Any]) -> Verdict:
    """Verdict from JSON; ValueError, TypeError or KeyError where something is missing or of another type."""
    verdict = Verdict(**found)
    if not isinstance(verdict.ok, bool) or not all(
        isinstance(x, dict) for x in (verdict.errors, verdict.times)
    ):
        raise TypeError("not a verdict")
    if not verdict.ok and not isinstance(verdict.reason, str):
        raise TypeError("a failure without a reason")
    return verdict


def command() -> list[str]:
    return [sys.executable, "-P", "-m", "grape_pe.attention.gpu.check"]


def run(description: dict[str, Any]) -> Verdict:
    """Start the child with `description` as JSON on its standard input, and read the verdict it prints."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(json.dumps({**description, "limit": LIMIT}).encode())
        given.seek(0)
        try:
            code = _wait(given, out, err)
        except OSError as problem:
            return Verdict(False, f"the check could not start: {problem}", conclusive=False)
        out.seek(0)
        err.seek(0)
        return _read(code, out.read(), err.read(), time.monotonic() - start)


def _wait(given: BinaryIO, out: BinaryIO, err: BinaryIO) -> int | None:
    """The child's exit code, or None when it had to be ended. It runs in a process group of its own."""
    child = subprocess.Popen(
        command(), stdin=given, stdout=out, stderr=err, env=_environment(), start_new_session=True
    )
    try:
        return child.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the whole group; a process stuck in the driver may not die, and is not waited for any longer."""
    if child.poll() is None:
        try:
            if os.name == "posix":
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            return


def _environment() -> dict[str, str]:
    """Ours, with this very package first on the path."""
    root = str(Path(__file__).parents[3])
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "GRAPE_TRITON": "on", "PYTHONPATH": os.pathsep.join(filter(None, (root, before)))}


def _read(code: int | None, out: bytes, err: bytes, seconds: float) -> Verdict:
    name = _signal_name(-code) if code is not None and code < 0 else None
    if code is None or name == "SIGALRM":  # the child's own clock, see check.main
        return Verdict(False, f"it did not end within {LIMIT:g} seconds", seconds=seconds)
    if name is not None:
        conclusive = name not in FROM_OUTSIDE
        return Verdict(False, f"it ended with {name}", seconds=seconds, conclusive=conclusive)
    try:
        lines = out.decode(errors="replace").strip().splitlines()
        return replace(verdict_from(json.loads(lines[-1])), seconds=seconds)
    except (ValueError, TypeError, KeyError, IndexError):
        said = err.decode(errors="replace").strip().splitlines()
        reason = f"it ended with code {code} and no readable result" + (f": {said[-1][:300]}" if said else "")
        return Verdict(False, reason, seconds=seconds, conclusive=False)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
