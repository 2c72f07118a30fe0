"""`grape doctor`: checks of this machine. Needs torch alone."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import CHECK_FAILED, OK, CommandError
from ..parsers import Commands, add_command

ABOUT = """Check this machine: versions and conflicts, compiler and CPU kernel, GPUs, and every implementation
of attention against float64, with its time and memory as ratios to torch's own attention.

Exit code 0: all is well; 1: something that should work does not."""


def add_parsers(commands: Commands) -> None:
    help, example = "check that everything works on this machine", "grape doctor --out doctor.json"
    parser = add_command(commands, "doctor", run_doctor, help, example, ABOUT)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="no times; verdicts on Triton kernels as stored")
    level.add_argument("--full", action="store_true", help="more dtypes, masks and longer sequences")
    parser.flag("--tune", "time the Triton kernels' tiles, keep the fastest")
    parser.option("--out", "FILE", "write a JSON file without paths or names", type=Path)
    parser.flag("--json")


def run_doctor(options: argparse.Namespace) -> int:
    from .text import lines

    if options.out is not None:
        _write(options.out, "", mode="a")  # refuse a bad path before minutes of work
    level = "quick" if options.quick else "full" if options.full else "normal"
    report = examine(level, options.tune)
    text = json.dumps(report, indent=1)
    if options.out is not None:
        _write(options.out, text + "\n")
    print(text if options.json else "\n".join(lines(report)))
    if options.out is not None:
        print(f"Written to {options.out}: no paths, user or host names in it.", file=sys.stderr)
    return OK if report["ok"] else CHECK_FAILED


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise CommandError(f"cannot write --out {path}: {problem.strerror}; give another file") from None


def examine(level: str, tune: bool = False) -> dict[str, Any]:
    """The whole report, as JSON."""
    from . import checks, machine

    report: dict[str, Any] = {
        "level": level,
        "versions": machine.versions(),
        "settings": machine.settings(),
        "conflicts": machine.conflicts(),
        "compiler": machine.compiler(),
        "cpu": machine.cpu(),
        "cpu_kernel": machine.cpu_kernel(),
        "cache": machine.cache(),
        "gpus": machine.gpus(),
        "why_no_gpu": machine.why_no_gpu(),
    }
    plans = {device: checks.plan(device, level) for device in checks.devices()}
    report["tiles"] = None
    if tune:  # first, so that the checks below use these tiles
        gpus = [(device, plan) for device, plan in plans.items() if device != "cpu"]
        report["tiles"] = [row for gpu in gpus for row in checks.tile_rows(*gpu, _progress)]
    report["checks"] = [asdict(row) for device in plans.items() for row in checks.rows(*device, _progress)]
    report["problems"] = _problems(report)
    report["ok"] = not report["problems"]
    return report


def _problems(report: dict[str, Any]) -> list[str]:
    found = list(report["conflicts"])
    if report["cpu_kernel"]["failed"]:
        found.append(f"the CPU kernel could not be built: {report['cpu_kernel']['reason']}")
    for row in [*report["checks"], *(report["tiles"] or ())]:
        if row["status"] == "failed":
            what = f"{row['impl']} on" if "impl" in row else "tiles on"
            more = f", {'+'.join(row['masks'])}" if "impl" in row else f", heads of {row['head_dim']}"
            found.append(f"{what} {row['device']}, {row['dtype']}, bias {row['bias']}{more}: {row['reason']}")
    return found


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
