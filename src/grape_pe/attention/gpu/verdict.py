"""Whether the Triton kernels may be trusted on this device: checked once in a child process, then stored.

`attend(impl="auto")` asks `why_not_trusted` before it sends a call to Triton. The answer is looked up in
memory, then in the cache folder. If there is none, `python -m grape_pe.attention.gpu.check` runs the kernels
on a small case in a child process, because a bad memory access ends a CUDA context and a hang never returns.

GRAPE_TRITON=check (default) does this; =on trusts the kernels without a check; =off never uses them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from . import store
from .store import Case, Device, Tiles, describe, padded

MODES = ("check", "on", "off")
#: seconds the child may take: most of them are spent by Triton's compiler
LIMIT = 300.0
#: signals of a crash; others come from outside and say nothing about the kernels
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP")
_known: dict[tuple[Any, ...], str | None] = {}
_warned: set[Case] = set()


@dataclass(frozen=True)
class Verdict:
    """Result of one check, or of the timing of tiles: `reason` is None if all is well.

    `errors` has for the output and each gradient the relative error against float64, that of the dense
    computation in the same dtype, and what is allowed. `repeatable`: the same bits when repeated.
    `conclusive` is False when the check could not run (no memory left, say): such a verdict is not stored.
    `times` are median seconds by kernel and tile, where tiles were timed; `tiles` are those kept.
    """

    reason: str | None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    repeatable: bool = True
    conclusive: bool = True
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    tiles: Tiles = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.reason is None


# Trust


def why_not_trusted(q: Tensor, v: Tensor, bias_kind: str, mask_names: tuple[str, ...]) -> str | None:
    """Why `auto` should not use the Triton kernels for this call, or None when they passed their check.

    `bias_kind` is that of problem.py; `mask_names` are some of causal, window, documents, padding.
    The first call of a kind may take a minute; later ones look in a dict. Nothing waits for the device.
    """
    heads = padded(q.shape[-1]), padded(v.shape[-1])
    return _why_not(torch.compiler.is_compiling(), q.device, q.dtype, *heads, bias_kind, mask_names)


def _why_not(passive: bool, device: torch.device, *call: Any) -> str | None:
    """`passive`: look up only. torch.compile calls this while it traces and keeps the answer."""
    mode = os.environ.get("GRAPE_TRITON") or "check"
    if mode not in MODES:
        raise ValueError(f"GRAPE_TRITON must be one of {', '.join(MODES)}; got {mode!r}")
    if mode != "check":
        return None if mode == "on" else "GRAPE_TRITON=off"
    if (device, *call) not in _known:
        case, found = Case.of(*call), describe(device)
        verdict = stored(found, case)
        if verdict is None and (passive or _capturing(device)):
            return _unchecked(case)
        verdict = verdict or check(device, case)
        _known[device, *call] = None if verdict.ok else _failed(found, case, verdict)
    return _known[device, *call]


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the package.
_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _unchecked(case: Case) -> str:
    """The reason, and one warning: a traced program keeps its slower kernels for good."""
    reason = "not yet checked on this device, and no check can run while tracing or capturing a graph"
    _warn_once(
        case,
        f"the Triton attention kernels ({case}): {reason}, so this program takes slower kernels. Call the model "
        "once without torch.compile or CUDA graphs first, or run `grape doctor`. GRAPE_TRITON=on skips the check.",
    )
    return reason


def _failed(device: Device, case: Case, verdict: Verdict) -> str:
    _warn_once(
        case,
        f"the Triton attention kernels failed their check on {device.name} ({case}): {verdict.reason}. The "
        "next implementation is used instead, which is slower. `grape doctor` checks again. Please report it "
        "with the file that `grape doctor --out doctor.json` writes.",
    )
    return f"its check failed on this device: {verdict.reason}"


def _warn_once(case: Case, text: str) -> None:
    if case not in _warned:
        _warned.add(case)
        warnings.warn(f"grape-pe: {text} GRAPE_TRITON=off silences this warning.", stacklevel=2)


# Stored verdicts


def _key(device: Device, case: Case) -> dict[str, Any]:
    """A verdict holds for the tiles that were checked, so it also depends on what was tuned."""
    return store.full_key(device, case, tiles=store.kept_tiles(device, case))


def stored(device: Device, case: Case) -> Verdict | None:
    """The verdict in the cache folder, or None."""
    try:
        return Verdict(**store.read("triton", _key(device, case)))
    except TypeError:
        return None


def keep(device: Device, case: Case, verdict: Verdict) -> None:
    """Without a usable folder the verdict lives as long as the process."""
    if verdict.conclusive:
        store.write("triton", _key(device, case), asdict(verdict))


# The check


def check(device: torch.device, case: Case, again: bool = False) -> Verdict:
    """Run the check in a child process and store its verdict.

    A process that waited for another one uses its verdict, unless `again`.
    """

    def find() -> Verdict:
        found = describe(device)
        verdict = None if again else stored(found, case)
        if verdict is None:
            verdict = run_case(device, case, tiles=store.kept_tiles(found, case))
            keep(found, case, verdict)
        return verdict

    return one_at_a_time(find)


def one_at_a_time(work: Callable[[], Verdict]) -> Verdict:
    """The result of `work`, while no other process of this machine checks or tunes."""
    try:
        with store.machine_lock(4 * LIMIT):
            return work()
    except TimeoutError:
        return Verdict("another process has been checking for too long", conclusive=False)


def run_case(device: torch.device, case: Case, **more: Any) -> Verdict:
    """The Triton kernels, checked in a child process; `more` as in check.main."""
    return run({**asdict(case), "impl": "triton", "device": str(device), **more})


# The child process: a crash or a hang there does not harm this one


def command() -> list[str]:
    return [sys.executable, "-P", "-m", "grape_pe.attention.gpu.check"]


def run(description: dict[str, Any]) -> Verdict:
    """Start the child with `description` as JSON, and read the verdict it prints.

    Output goes to files: a process that the child leaves behind would keep a pipe open.
    """
    path = filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")))  # this very package
    environment = {**os.environ, "GRAPE_TRITON": "on", "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                [*command(), json.dumps(description)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as problem:
            return Verdict(f"the check could not start: {problem}", conclusive=False)
        return _read(_wait(child), _last_line(out), _last_line(err))


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip().rpartition("\n")[2]


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


def _read(code: int | None, out: str, err: str) -> Verdict:
    if code is None:
        return Verdict(f"it did not end within {LIMIT:g} seconds")
    if code < 0:
        name = next((x.name for x in signal.Signals if x == -code), f"signal {-code}")
        return Verdict(f"it ended with {name}", conclusive=name in CRASHES)
    try:
        return Verdict(**json.loads(out))
    except (ValueError, TypeError):
        return Verdict(f"it ended with code {code} and no readable result: {err[:300]}", conclusive=False)
