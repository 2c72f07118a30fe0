"""`grape bench`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from .errors import CommandError
from .parsers import Commands, add_command

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def add_parsers(commands: Commands) -> None:
    help, example = "run a benchmark of the source checkout", "grape bench attention --lengths 4096"
    parser = add_command(commands, "bench", run_bench, help, example)
    parser.add_argument("name", help="a benchmark: attention, decode, model, rotation, train …")
    about = "options of the benchmark; grape bench NAME --help lists them"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=about)


def run_bench(options: argparse.Namespace) -> int:
    """Load benchmarks/NAME.py and call its main(argv)."""
    if not BENCHMARKS.is_dir():
        raise CommandError(
            f"no benchmarks in {BENCHMARKS.parent}: they are part of the source checkout; clone the repository "
            "and install it with pip install -e ."
        )
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("_"))
    if options.name not in names:
        raise CommandError(f"no benchmark {options.name!r}; choose {', '.join(names)}")
    spec = importlib.util.spec_from_file_location(
        f"benchmarks.{options.name}", BENCHMARKS / f"{options.name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, "main"):
        raise CommandError(f"benchmark {options.name!r} has no main(argv) to call")
    return int(module.main(options.arguments) or 0)
