"""`grape bench attention`: every bias against torch's causal attention, and against itself as a mask.

Contenders take turns in each round, so that a slow minute of the machine hits all of them, and a ratio is
taken within a round. Nothing is timed before it was compared with float64 in the same process. Peak
memory is what the process held beyond inputs, outputs and gradients, measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import grape_pe as grape
from grape_pe.attention import attend, record_pruning
from grape_pe.attention.cpu import build as native
from grape_pe.bias import Bias

ENCODINGS = ("alibi", "fox", "grape-a-q", "grape-a-k", "grape-a-qk", "grape-ap")
DISTANCES = ("t5", "kerple-log", "relative")  # learned tables of distances, whole, bent and mixed
GOALS = {"alibi": 0.8, "fox": 1.25, "grape-a-q": 1.25, "grape-a-k": 1.25, "grape-a-qk": 1.25, "grape-ap": 2.0}
GOALS |= dict.fromkeys(DISTANCES, 1.2)
UNPRUNED_GOAL = 1.3  # slope biases
SCALING_GOAL = 4.4
GATE_LENGTH = 300
SMALL_CALLS = 50  # that are timed together where one takes microseconds
#: on a machine that others use, the processor's time of one thread is worth more than the clock on the wall
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, eq=False)
class Problem:
    """Leaves q, k, v and a bias of leaves, as an encoding at its initial values makes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    direction: Tensor  # the gradient that comes back

    def to(self, dtype: torch.dtype) -> Problem:
        def leaf(x: Tensor) -> Tensor:
            to = dtype if x.dtype != torch.float64 else x.dtype
            return x.detach().clone().to(to).requires_grad_(x.requires_grad)

        q, k, v = (leaf(x) for x in (self.q, self.k, self.v))
        return Problem(q, k, v, self.bias.map(leaf), self.direction.to(dtype))

    def leaves(self) -> list[Tensor]:
        found = [self.q, self.k, self.v]
        self.bias.map(lambda x: found.append(x) or x if x.requires_grad else x)
        return found


def make(encoding: str, length: int, heads: int, width: int) -> Problem:
    torch.manual_seed(0)
    hidden = heads * width
    enc = grape.build(encoding, heads=heads, head_dim=width, width=hidden)
    q, k, v = (torch.randn(1, heads, length, width) for _ in range(3))
    q, k = (F.rms_norm(x, (width,)) for x in (q, k))  # QK-norm, as the models have it
    code = enc(q, k, x=torch.randn(1, length, hidden))
    bias = code.bias.map(lambda x: x.detach().clone().requires_grad_(x.requires_grad))
    leaves = (x.detach().clone().requires_grad_() for x in (code.q, code.k, v))
    return Problem(*leaves, bias, torch.randn(1, heads, length, width))


def by_sdpa(p: Problem) -> Tensor:
    return F.scaled_dot_product_attention(p.q, p.k, p.v, is_causal=True)


def by_mask(p: Problem) -> Tensor:
    length = p.q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = p.bias.dense().to(p.q.dtype).masked_fill(hidden, -torch.inf)
    return F.scaled_dot_product_attention(p.q, p.k, p.v, attn_mask=mask)


def ours(p: Problem) -> Tensor:
    return attend(p.q, p.k, p.v, bias=p.bias)


def ours_unpruned(p: Problem) -> Tensor:
    return attend(p.q, p.k, p.v, bias=p.bias, prune=None)


CONTENDERS: dict[str, Callable[[Problem], Tensor]] = {
    "sdpa": by_sdpa,
    "pruned": ours,
    "unpruned": ours_unpruned,
    "mask": by_mask,
}


def gate(encoding: str, heads: int, width: int) -> None:
    """No speed without correctness: at most twice the dense float32 error, output and gradients."""
    small = make(encoding, GATE_LENGTH, heads, width)
    truth, dense = (
        _evaluate(small.to(dtype), lambda p: attend(p.q, p.k, p.v, bias=p.bias, impl="reference"))
        for dtype in (torch.float64, torch.float32)
    )
    for name in ("pruned", "unpruned"):
        got = _evaluate(small.to(torch.float32), CONTENDERS[name])
        for right, plain, mine in zip(truth, dense, got, strict=True):
            allowed = 2 * (plain - right).norm() + 1e-6 * right.norm() + 1e-6
            if not (mine - right).norm() <= allowed:
                raise SystemExit(f"{encoding} ({name}) fails its correctness gate: no times are reported")


def _evaluate(p: Problem, run: Callable[[Problem], Tensor]) -> list[Tensor]:
    y = run(p)
    y.backward(p.direction)
    return [y.detach().double(), *(x.grad.double() for x in p.leaves() if x.grad is not None)]


@dataclass
class Row:
    encoding: str
    length: int
    skipped: float = 0.0
    #: seconds by contender, one for each round
    forward: dict[str, list[float]] = field(default_factory=dict)
    both: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int | None = None

    def ratio(self, contender: str, part: str = "both") -> tuple[float, float, float] | None:
        """Median, least and most of time / SDPA's time in the same round."""
        times = getattr(self, part)
        if contender not in times:
            return None
        ratios = [a / b for a, b in zip(times[contender], times["sdpa"], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def measure(encoding: str, options: argparse.Namespace) -> list[Row]:
    """A row for each length; in a round every contender takes its turn at every length."""
    lengths = [options.small, *options.lengths] if options.small else options.lengths
    problems = [make(encoding, length, options.heads, options.width) for length in lengths]
    rows = [Row(encoding, length, _skipped(p)) for length, p in zip(lengths, problems, strict=True)]
    for number in range(options.rounds + 1):
        for row, problem in zip(rows, problems, strict=True):
            for name in CONTENDERS:
                if name == "mask" and not (options.mask and _mask_fits(problem)):
                    continue
                repeat = SMALL_CALLS if row.length == options.small else 1
                forward, both = _time(problem, CONTENDERS[name], CLOCKS[options.clock], repeat)
                if number:  # the first round warms up
                    row.forward.setdefault(name, []).append(forward)
                    row.both.setdefault(name, []).append(both)
    return rows


def _skipped(p: Problem) -> float:
    with record_pruning() as report, torch.no_grad():
        ours(p)
    return report.fraction


def _mask_fits(p: Problem) -> bool:
    """The mask, its gradient and the softmax of the math path: some eight T x T tensors a head."""
    need = 8 * 4 * p.q.shape[1] * p.q.shape[2] ** 2
    return need < 0.6 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _time(
    p: Problem, run: Callable[[Problem], Tensor], now: Callable[[], float], repeat: int = 1
) -> tuple[float, float]:
    """Seconds of the forward pass and of both, the mean of so many calls."""
    leaves, forward, both = p.leaves(), 0.0, 0.0
    for _ in range(repeat):
        for leaf in leaves:
            leaf.grad = None
        start = now()
        y = run(p)
        middle = now()
        y.backward(p.direction)
        forward, both = forward + middle - start, both + now() - start
    return forward / repeat, both / repeat


def peak_memory(encoding: str, length: int, options: argparse.Namespace) -> int:
    """In a fresh process: bytes above inputs, output and gradients, forward and backward together."""
    command = [sys.executable, __file__, "--peak-of", encoding, "--lengths", str(length)]
    command += ["--heads", str(options.heads), "--width", str(options.width)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def _report_peak(encoding: str, length: int, options: argparse.Namespace) -> None:
    small = make(encoding, 64, options.heads, options.width)
    ours(small).backward(small.direction)  # builds and imports what is needed
    problem = make(encoding, length, options.heads, options.width)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    y = ours(problem)
    y.backward(problem.direction)
    kept = y.nbytes + sum(x.grad.nbytes for x in problem.leaves() if x.grad is not None)
    print(max(0, _status("VmHWM") - before - kept))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}")


def _cell(ratio: tuple[float, float, float] | None) -> str:
    return "-" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f}-{ratio[2]:.2f})"


def table(rows: list[Row]) -> str:
    """Markdown: ratios to causal SDPA, median (least-most) over rounds."""
    lines = [
        "| encoding | T | SDPA s | fwd | fwd+bwd | fwd+bwd unpruned | as a mask | skipped | peak MB | goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}"
        cells = [row.encoding, str(row.length), f"{statistics.median(row.both['sdpa']):.2f}"]
        cells += [_cell(row.ratio("pruned", "forward")), _cell(row.ratio("pruned"))]
        cells += [
            _cell(row.ratio("unpruned")),
            _cell(row.ratio("mask")),
            f"{row.skipped:.0%}",
            peak,
            _goal(row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def small_table(rows: list[Row]) -> str:
    """The same for calls so short that their overhead is most of the time; microseconds."""
    lines = [
        "| one small call | T | SDPA fwd us | fwd us | fwd | SDPA fwd+bwd us | fwd+bwd us | fwd+bwd |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.encoding, str(row.length)]
        for part, times in (("forward", row.forward), ("both", row.both)):
            cells += [f"{1e6 * statistics.median(times[name]):.0f}" for name in ("sdpa", "pruned")]
            cells.append(_cell(row.ratio("pruned", part)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _goal(row: Row) -> str:
    if row.length != 4096 or row.encoding not in GOALS:
        return ""
    pruned, unpruned = row.ratio("pruned"), row.ratio("unpruned")
    assert pruned is not None and unpruned is not None
    goal = GOALS[row.encoding]
    limit = goal if row.encoding in DISTANCES else UNPRUNED_GOAL
    met = pruned[0] <= goal and (row.encoding == "grape-ap" or unpruned[0] <= limit)
    return f"{goal} {'met' if met else 'MISSED'}"


def scaling(rows: list[Row]) -> list[str]:
    """time(8192) / time(4096) in the same round, unpruned, median (least-most): 4 is the arithmetic."""
    times = {(row.encoding, row.length): row.both["unpruned"] for row in rows}
    lines = []
    for name in dict.fromkeys(row.encoding for row in rows):
        if (name, 8192) in times and (name, 4096) in times:
            ratios = [b / a for a, b in zip(times[name, 4096], times[name, 8192], strict=True)]
            spread = (statistics.median(ratios), min(ratios), max(ratios))
            lines.append(f"{name}: time(8192)/time(4096) = {_cell(spread)} (goal {SCALING_GOAL})")
    return lines


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grape bench attention", description=__doc__)
    parser.add_argument("--encodings", nargs="+", default=[*ENCODINGS, *DISTANCES], metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 8192], metavar="T")
    parser.add_argument("--small", type=int, default=64, help="T of the overhead of a small call; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="features of a head")
    parser.add_argument("--threads", type=int, default=None, help="default: as many as torch takes")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine, with --threads 1"
    )
    parser.add_argument("--no-mask", dest="mask", action="store_false", help="leave out the dense mask")
    parser.add_argument("--memory-length", type=int, default=16384, help="T of the peak memory; 0 for none")
    parser.add_argument("--json", type=Path, default=Path("bench-attention.json"))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    low = {
        "--rounds": options.rounds,
        "--heads": options.heads,
        "--width": options.width,
        "--lengths": min(options.lengths),
    }
    for name, value in low.items():
        if value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    unknown = [name for name in options.encodings if set(name.split("+")) - set(grape.names())]
    if unknown:
        parser.error(f"unknown encoding {unknown[0]!r}; there are {', '.join(grape.names())}")
    if options.json.exists() and options.json.is_dir():
        parser.error(f"--json must name a file, {options.json} is a directory")
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak_of:
        _report_peak(options.peak_of, options.lengths[0], options)
        return 0
    rows: list[Row] = []
    for encoding in options.encodings:
        gate(encoding, options.heads, options.width)
        print(f"{encoding}: correct", file=sys.stderr)
        rows += measure(encoding, options)
        if options.memory_length:
            rows[-1].peak_bytes = peak_memory(encoding, options.memory_length, options)
    print(table([row for row in rows if row.length != options.small]))
    if options.small:
        print("\n" + small_table([row for row in rows if row.length == options.small]) + "\n")
    if options.memory_length:
        print(f"peak memory: forward + backward beyond inputs and outputs at T = {options.memory_length}")
    print("\n".join(scaling(rows)))
    written = {"machine": machine(), "options": {**vars(options), "json": str(options.json)}}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**written, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


def machine() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": native.why_not() or "compiled",
        "platform": platform.platform(),
        "load": os.getloadavg(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
