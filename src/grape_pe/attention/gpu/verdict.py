"""Whether the Triton kernels may be trusted on this device: checked once in a child process, then stored.

`attend(impl="auto")` asks `why_not_trusted` before it sends a call to Triton. The answer is looked up in
memory, then in the cache folder. If there is none, `python -m grape_pe.attention.gpu.check` runs the kernels
on a small case in a child process, because a bad memory access ends a CUDA context and a hang never returns.

GRAPE_TRITON=check (default) does this; =on trusts the kernels without a check; =off never uses them.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from . import child, store
from .child import Verdict, verdict_from
from .device import Device, describe
from .store import Case, padded

MODES = ("check", "on", "off")
_known: dict[tuple[Any, ...], str | None] = {}
_warned: set[Case] = set()
_checking = threading.Lock()


def why_not_trusted(q: Tensor, v: Tensor, bias_kind: str, mask_names: tuple[str, ...]) -> str | None:
    """Why `auto` should not use the Triton kernels for this call, or None when they passed their check.

    `bias_kind` is none | slope | path | both; `mask_names` are some of causal, window, documents, padding.
    The first call of a kind may take a minute; later ones look in a dict. Nothing waits for the device.
    """
    heads = padded(q.shape[-1]), padded(v.shape[-1])
    return _why_not(torch.compiler.is_compiling(), q.device, q.dtype, *heads, bias_kind, mask_names)


def _why_not(passive: bool, device: torch.device, *call: Any) -> str | None:
    """`passive`: look up only. torch.compile calls this while it traces and keeps the answer."""
    mode = os.environ.get("GRAPE_TRITON", "check")
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
    _warn_once(
        case,
        f"the Triton kernels have not been checked on this device ({case}), and no check can run while "
        "torch.compile traces or a CUDA graph is captured, so this program takes slower kernels. Call the "
        "model once without torch.compile first, or run `grape doctor`. GRAPE_TRITON=on skips the check, "
        "GRAPE_TRITON=off silences this warning.",
    )
    return "not yet checked on this device, and no check can run while tracing or capturing a graph"


def _failed(device: Device, case: Case, verdict: Verdict) -> str:
    _warn_once(
        case,
        f"the Triton attention kernels failed their check on {device.name} ({case}): {verdict.reason}. The "
        "next implementation is used instead, which is slower; attend.explain(…) says which. "
        "GRAPE_TRITON=off silences this warning; `grape doctor` checks again. Please report it with the "
        "file that `grape doctor --out doctor.json` writes.",
    )
    return f"its check failed on this device: {verdict.reason}"


def _warn_once(case: Case, text: str) -> None:
    if case not in _warned:
        _warned.add(case)
        warnings.warn(f"grape-pe: {text}", stacklevel=2)


# Stored verdicts


def _key(device: Device, case: Case) -> dict[str, Any]:
    """A verdict holds for the tiles that were checked, so it also depends on what was tuned."""
    return store.full_key(device, case, tiles=store.kept_tiles(device, case))


def stored(device: Device, case: Case) -> Verdict | None:
    """The verdict in the cache folder, or None."""
    try:
        return verdict_from(store.read("triton", _key(device, case)))
    except (ValueError, TypeError, KeyError):
        return None


def keep(device: Device, case: Case, verdict: Verdict) -> None:
    """Without a usable folder the verdict lives as long as the process."""
    if verdict.conclusive:
        store.write("triton", _key(device, case), asdict(verdict))


# The check


def check(device: torch.device, case: Case, again: bool = False) -> Verdict:
    """Run the check in a child process and store its verdict.

    Whoever waited for another process finds that process's verdict, unless `again` asks for a new one.
    """

    def find() -> Verdict:
        found = describe(device)
        verdict = None if again else stored(found, case)
        if verdict is None:
            verdict = in_child(device, case, tiles=store.kept_tiles(found, case))
            keep(found, case, verdict)
        return verdict

    return one_at_a_time(find)


def in_child(device: torch.device, case: Case, **more: Any) -> Verdict:
    """The Triton kernels, checked in a child process; `more` as in check.main."""
    return child.run({**asdict(case), "impl": "triton", "device": str(device), **more})


def one_at_a_time(run: Callable[[], Verdict]) -> Verdict:
    """The result of `run`, while no other process of this machine checks or tunes."""
    try:
        with _checking, store.machine_lock(4 * child.LIMIT):
            return run()
    except TimeoutError:
        return Verdict(False, "another process has been checking for too long", conclusive=False)
