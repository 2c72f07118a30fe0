"""`grape`: the command line. A subcommand is one function here that adds its parser."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import __version__

Run = Callable[[argparse.Namespace], int]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class CommandError(Exception):
    """Something the user can put right: shown as one line, never as a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    run: Run = options.run
    try:
        return run(options)
    except CommandError as problem:
        print(f"grape: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grape", description="Position encodings for Transformers.")
    parser.add_argument("--version", action="version", version=f"grape-pe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_bench(commands)
    _add_eval(commands)
    _add_model(commands)
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench", help="measure", description="Run a benchmark of the source checkout."
    )
    bench.add_argument("name", help="which: a module of benchmarks/, such as attention")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="its own; try --help")
    bench.set_defaults(run=_bench)


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .lab.evaluate import add_parser

    scoring = commands.add_parser("eval", help="score a model", description="Score a model.")
    add_parser(scoring.add_subparsers(title="evaluations", metavar="WHAT", required=True))


def _add_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = (
        "Count the parameters of one of the paper's models. Example: grape model medium --encoding grape-ap"
    )
    model = commands.add_parser("model", help="count a model's parameters", description=about)
    model.add_argument("size", choices=("medium", "large"))
    model.add_argument("--encoding", default="rope", help="any name, or several joined by + (default: rope)")
    model.add_argument("--kv-shift", action="store_true")
    model.add_argument("--real", action="store_true", help="allocate it; by default it is built on meta")
    model.set_defaults(run=_model)


def _model(options: argparse.Namespace) -> int:
    import torch

    from .models import Decoder, DecoderConfig

    make = DecoderConfig.medium if options.size == "medium" else DecoderConfig.large
    try:
        config = make(encoding=options.encoding, kv_shift=options.kv_shift)
        encoding = config.build_encoding()
    except ValueError as problem:
        raise CommandError(str(problem)) from None
    with torch.device("cpu" if options.real else "meta"):
        model = Decoder(config)
    print(f"{sum(p.numel() for p in model.parameters()):>13,} parameters")
    print(f"{sum(p.numel() for p in encoding.parameters()):>13,} of the encoding in each layer")
    return 0


def _bench(options: argparse.Namespace) -> int:
    """Load benchmarks/NAME.py and call its main(argv)."""
    if not BENCHMARKS.is_dir():
        raise CommandError(
            f"benchmarks live in the source checkout, and there is none at {BENCHMARKS.parent}; "
            "clone the repository and install it with pip install -e ."
        )
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("_"))
    if options.name not in names:
        raise CommandError(f"no benchmark {options.name!r}; there are {', '.join(names)}")
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


if __name__ == "__main__":
    raise SystemExit(main())
