"""The report of `grape doctor` as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from ...lab.columns import aligned

HEADER = ("bias", "implementation", "call", "check", "error", "of allowed", "same bits", "time", "memory")
LEGEND = (
    "",
    "  error: the largest relative error against float64, of the output and all gradients. of allowed: half",
    "  precision may have twice the error of the dense computation, float32 four times it or 1e-5.",
    "  time, memory: ratios to torch's own causal attention without a bias, forward and backward.",
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    yield "Versions"
    yield from _pairs(report["versions"] | report["settings"])
    yield from (f"  CONFLICT: {text}" for text in report["conflicts"])
    yield ""
    yield "CPU"
    yield from _pairs(_cpu(report))
    yield ""
    yield "GPU"
    yield from _gpus(report)
    yield from _tiles(report["tiles"], bool(report["gpus"]))
    for title, group in groupby(report["checks"], key=_title):
        yield ""
        yield title
        yield from _table(list(group))
    yield from LEGEND
    yield ""
    yield from _refusals(report["checks"])
    yield "All is well." if report["ok"] else "PROBLEMS"
    yield from (f"  {text}" for text in report["problems"])


def _pairs(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"  {name:<12}  {'not installed' if value is None else value}"


def _cpu(report: dict[str, Any]) -> dict[str, str]:
    cpu, kernel, cache = report["cpu"], report["cpu_kernel"], report["cache"]
    if cache["usable"]:
        folder = f"usable, {cache['kernels']} compiled kernels, {cache['verdicts']} stored verdicts"
    else:
        folder = f"not usable: {cache['reason']}"
    return {
        "processor": f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads, {cpu['capability']}",
        "compiler": report["compiler"] or "none: install g++ or clang++ for the CPU kernel",
        "CPU kernel": "built" if kernel["built"] else f"not built: {kernel['reason']}",
        "cache folder": folder,
    }


def _gpus(report: dict[str, Any]) -> Iterator[str]:
    if not report["gpus"]:
        yield f"  none: {report['why_no_gpu']}. The Triton kernels were not run."
    for index, gpu in enumerate(report["gpus"]):
        yield f"  cuda:{index}  {gpu['name']}, capability {gpu['capability']}, driver {gpu['driver']}"
        yield (
            f"          {gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['shared_memory_kib']} KiB of shared memory each"
        )


def _tiles(found: list[dict[str, Any]] | None, gpus: bool) -> Iterator[str]:
    """The part of the report about tiles; nothing unless they were asked for."""
    if found is None:
        return
    yield ""
    yield "Tiles of the Triton kernels (queries x keys / warps / stages, milliseconds; * is kept and used)"
    if not gpus:
        yield "  No GPU: there is nothing to time."
    for row in found:
        call = f"{row['device']}, {row['dtype']}, heads of {row['head_dim']}, bias {row['bias']}"
        yield f"  {call}" + (f": nothing kept. {row['reason']}" if row["status"] != "kept" else "")
        for kernel, times in row["times"].items():
            cells = (_cell(tile, time, row["tiles"].get(kernel)) for tile, time in times.items())
            yield f"    {kernel:<15}" + "   ".join(cells)


def _cell(tile: str, seconds: float, kept: list[int] | None) -> str:
    queries, keys, warps, stages = numbers = [int(n) for n in tile.split()]
    return f"{queries}x{keys}/{warps}/{stages} {1000 * seconds:.3f}{'*' if numbers == kept else ''}"


def _title(row: dict[str, Any]) -> str:
    call = f"{row['dtype']}, heads of {row['head_dim']}, {'+'.join(row['masks'])}"
    return f"Attention on {row['device']}, {call}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    cells = [HEADER, *(_cells(row) for row in rows if row["status"] != "refused")]
    if all(row["time"] is None for row in rows):
        cells = [row[:-2] for row in cells]
    yield from (f"  {line}" for line in aligned(cells, left=4).splitlines())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(name: str, form: str) -> str:
        return "-" if row[name] is None else format(row[name], form)

    bits = {None: "-", True: "yes", False: "no"}[row["repeatable"]]
    numbers = shown("error", ".1e"), shown("of_allowed", ".0%"), bits
    ratios = shown("time", ".2f"), shown("memory", ".2f")
    return (row["bias"], row["impl"], row["call"], row["status"], *numbers, *ratios)


def _refusals(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Why some rows are missing, each reason once."""
    found = dict.fromkeys((row["impl"], row["reason"]) for row in rows if row["status"] == "refused")
    if found:
        yield "Not used for some of these calls"
        yield from (f"  {name}: {reason}" for name, reason in found)
        yield ""
