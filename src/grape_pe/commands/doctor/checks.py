"""Checks of every implementation of attention against float64, and times relative to torch's own."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.attend import IMPLEMENTATIONS, attend
from ...attention.gpu import check, tune, verdict
from ...attention.gpu.api import why_not_device
from ...attention.gpu.check import OURS, Problem, Tensors, inputs, why_not
from ...attention.gpu.store import Case
from ...attention.gpu.verdict import Verdict
from .machine import scrub

BIASES = ("none", "slope", "path", "slope+path", "distance")
CAUSAL, ALL_MASKS = ("causal",), ("causal", "documents", "padding", "window")
#: longest sequence for timing the dense reference
LONGEST_DENSE = 1024
ROUNDS = 5


@dataclass(frozen=True)
class Plan:
    """Extent of the checks; kernels are timed at `tokens` tokens, 0 for no times."""

    dtypes: tuple[str, ...]
    heads: tuple[int, ...]
    masks: tuple[tuple[str, ...], ...]
    tokens: int
    compiles: bool  # include implementations that need torch.compile on this device
    again: bool  # repeat checks of Triton kernels that have a stored verdict


def plan(device: str, level: str) -> Plan:
    """`level` is quick, normal or full."""
    cuda, full = device != "cpu", level == "full"
    dtypes = ("bfloat16", "float16", "float32") if cuda else ("float32", "bfloat16")
    tokens = {"quick": 0, "normal": 4096 if cuda else 1024, "full": 8192 if cuda else 4096}[level]
    return Plan(
        dtypes=dtypes if full else dtypes[:1],
        heads=(64, 128) if cuda and level != "quick" else (64,),
        masks=(CAUSAL, ALL_MASKS) if full else (CAUSAL,),
        tokens=tokens,
        compiles=cuda or full,
        again=level != "quick",
    )


@dataclass(frozen=True)
class Row:
    """One implementation and one kind of call.

    `call` is "training" (forward and backward), or "decoding" (the last query alone, no gradients) for
    implementations without training. `time` and `memory` are ratios to torch's attention at `tokens` tokens.
    """

    device: str
    dtype: str
    head_dim: int
    masks: tuple[str, ...]
    bias: str
    impl: str
    status: str  # passed | failed | refused
    call: str = "training"
    reason: str | None = None
    error: float | None = None
    of_allowed: float | None = None
    repeatable: bool | None = None
    tokens: int | None = None
    time: float | None = None
    memory: float | None = None
    megabytes: float | None = None


def implementations() -> list[str]:
    return sorted(IMPLEMENTATIONS)


def devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def rows(device: str, what: Plan, progress: Callable[[str], None]) -> Iterator[Row]:
    """All rows of a device, bias by bias: first the checks, then times of those that passed."""
    crashed, names = _crashes(device), implementations()
    for dtype, heads, masks, bias in itertools.product(what.dtypes, what.heads, what.masks, BIASES):
        progress(f"{device}, {dtype}, heads of {heads}, {'+'.join(masks)}, bias {bias}")
        problem = Problem("", device, dtype, heads, heads, bias, masks)
        found = [_checked(replace(problem, impl=name), what, crashed) for name in names]
        yield from _timed(found, problem, what) if masks == CAUSAL else found
    progress("")


def _crashes(device: str) -> dict[str, str]:
    """Run the compiled CPU kernel in a child process first, as a crash would end this one."""
    problem = Problem("cpu", "cpu", "float32", 64, 64, "slope+path+distance")
    if device != "cpu" or "cpu" not in implementations() or why_not(problem, inputs(problem)) is not None:
        return {}
    found = verdict.run(asdict(problem))
    return {} if found.ok or found.errors else {"cpu": found.reason or "no result"}


def _checked(problem: Problem, what: Plan, crashed: dict[str, str]) -> Row:
    p, tensors = problem, inputs(problem)
    row = Row(p.device, p.dtype, p.head_dim, p.masks, p.bias, p.impl, "refused")
    refusal = why_not(p, tensors)
    if refusal is not None and why_not(p, tensors, 1) is not None:
        reason = refusal.split("cannot do this: ", 1)[-1].split("; these can", 1)[0]
        return replace(row, reason=scrub(reason))
    row = replace(row, call="training" if refusal is None else "decoding")
    if p.impl == "flex" and not what.compiles:
        return replace(row, reason="checked with --full only: it compiles for minutes")
    if p.impl in crashed:
        return replace(row, status="failed", reason=scrub(crashed[p.impl]))
    return _with_verdict(row, _verdict(p, what))


def _verdict(problem: Problem, what: Plan) -> Verdict:
    if problem.impl != "triton" or problem.device == "cpu":
        return check.safely(problem)
    dtype, heads = getattr(torch, problem.dtype), (problem.head_dim, problem.value_dim)
    case = Case.of(dtype, *heads, problem.bias, problem.masks)
    return verdict.check(torch.device(problem.device), case, again=what.again)


def _with_verdict(row: Row, found: Verdict) -> Row:
    """Our kernels must be deterministic to the bit; some of torch's are not."""
    good = found.ok or (not found.repeatable and row.impl not in OURS)
    errors = found.errors.values()
    return replace(
        row,
        status="passed" if good else "failed",
        reason=scrub(found.reason or "") or None,
        error=max((e["error"] for e in errors), default=None),
        of_allowed=max((e["error"] / e["allowed"] for e in errors), default=None),
        repeatable=found.repeatable if found.errors else None,
    )


def tile_rows(device: str, what: Plan, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The tiles for each dtype, head size and bias; `status` is kept, failed or refused."""
    for dtype, heads, bias in itertools.product(what.dtypes, what.heads, BIASES):
        progress(f"{device}, {dtype}, heads of {heads}, bias {bias}: timing tiles")
        place, status = torch.device(device), "refused"
        found = Verdict(why_not_device(place))
        if found.reason is None:
            found = tune.tune(place, Case(dtype, heads, heads, bias))
            status = "kept" if found.ok else "failed"
        row = {"device": device, "dtype": dtype, "head_dim": heads, "bias": bias, "status": status}
        yield row | {"reason": scrub(found.reason or "") or None, "tiles": found.tiles, "times": found.times}
    progress("")


# Time and memory


def _timed(found: list[Row], problem: Problem, what: Plan) -> list[Row]:
    """The rows with times: each round runs torch's attention and the implementation once."""
    if not what.tokens or not any(row.status == "passed" for row in found):
        return found
    large = replace(problem, tokens=what.tokens)
    tensors = inputs(large)
    plain = {name: tensors[name] for name in "qkv"}
    rows = []
    for row in found:
        if row.status == "passed" and (row.impl != "reference" or what.tokens <= LONGEST_DENSE):
            calls = _call(row, large, tensors, attend), _call(row, large, plain, _torch)
            row = replace(row, **_ratios(*calls, large))
        rows.append(row)
    return rows


def _call(row: Row, problem: Problem, t: Tensors, function: Callable[..., Tensor]) -> Callable[[], None]:
    """Forward and backward, or one query for decoding."""
    few = None if row.call == "training" else 1

    def run() -> None:
        with torch.set_grad_enabled(few is None):
            leaves = {name: tensor.detach().requires_grad_(few is None) for name, tensor in t.items()}
            y = check.call(replace(problem, impl=row.impl), leaves, few, function)
            if few is None:
                y.sum().backward()

    return run


def _torch(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Causal attention without bias; a single query needs no mask."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def _ratios(ours: Callable[[], object], torchs: Callable[[], object], problem: Problem) -> dict[str, Any]:
    device = problem.device
    try:
        for run in (ours, torchs):  # the first call compiles
            run()
        times = [_seconds(ours, device) / _seconds(torchs, device) for _ in range(ROUNDS)]
        mine, theirs = peak_bytes(ours, device), peak_bytes(torchs, device)
    except torch.OutOfMemoryError:
        return {"reason": f"not timed: no memory left at {problem.tokens} tokens"}
    except RuntimeError as problem_:
        return {"status": "failed", "reason": scrub(f"at {problem.tokens} tokens: {problem_}")}
    return {
        "tokens": problem.tokens,
        "time": round(statistics.median(times), 3),
        "memory": round(mine / theirs, 3) if mine and theirs else None,
        "megabytes": round(mine / 2**20, 2) if mine else None,
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    wait = functools.partial(torch.cuda.synchronize, device) if device != "cpu" else torch.cpu.synchronize
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: str) -> int | None:
    """Peak memory of torch's allocator during a call, minus that before it."""
    if device == "cpu":
        return _peak_bytes_cpu(run)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _peak_bytes_cpu(run: Callable[[], object]) -> int | None:
    """From the allocations torch's profiler records."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print a line for every start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    results = record.profiler.kineto_results if record.profiler is not None else None
    if results is None:
        return None
    live = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
