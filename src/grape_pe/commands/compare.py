"""`grape compare`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..extras import require
from .errors import OK, CommandError
from .parsers import Commands, add_command, add_json, natural, positive
from .train import add_settings

PROBE = "probe."
Number = TypeVar("Number", int, float)
EXAMPLE = "grape compare small --encodings rope,fox,grape-ap,grape-ap+kv --seeds 3 --out results/mine"


def add_parsers(commands: Commands) -> None:
    about = (
        "Train each encoding with each seed, evaluate, and write a report. To continue after a stop, or to add\n"
        "encodings or seeds, run the command again with the same --out.\n\n"
        "WHAT is demo, small, small-kv, extrapolation, flip-flop, mqar, probes, or a YAML file. Settings of its\n"
        "recipe are options, as in grape train (--train.steps 500); those of probes begin with --probe.\n"
    )
    parser = add_command(commands, "compare", run_compare, "compare encodings", EXAMPLE, about)
    parser.usage = "grape compare WHAT [--encodings NAMES] [--seeds N] [--out DIR] [options]"
    parser.add_argument("comparison", metavar="WHAT", help="a shipped comparison or a file")
    parser.add_argument(
        "--encodings",
        metavar="NAMES",
        help="such as 'rope,fox[forget_bias=4]+kv'; +kv adds KV-shift",
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="number of seeds")
    parser.add_argument("--tasks", metavar="NAMES", help="probes, separated by commas, or none")
    parser.add_argument(
        "--budgets", metavar="N,N", help="also measure the loss after so many tokens, or none"
    )
    parser.add_argument(
        "--sweep",
        metavar="train.lr=A,B",
        help="rates to try on seed 0; each encoding keeps its best",
    )
    parser.add_argument("--out", metavar="DIR", help="results (default: results/WHAT)")
    parser.add_argument(
        "--from", dest="start", type=Path, metavar="FILE",
        help="continue from a file of grape report --jsonl",
    )  # fmt: skip
    _add_engine(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    add_settings(parser, ("", PROBE))
    add_json(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on", default="local", metavar="ENGINE",
        help="local (default), ray, ray://HOST:PORT or slurm",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=positive, default=0, metavar="N",
        help="parallel runs (default: as many as there is room for)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=positive, metavar="N",
        help="CPU threads of a run (default: cores / --jobs; 1 on a cluster)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus-per-job", type=natural, metavar="N",
        help="GPUs of a run (default: 1 if there is one)",
    )  # fmt: skip
    parser.add_argument(
        "--slurm", action="append", default=[], metavar="KEY=VALUE",
        help="sbatch parameter; time=4:00:00 or the like is needed",
    )  # fmt: skip


def run_compare(options: argparse.Namespace) -> int:
    require("pydantic", "lab")
    require("plotly", "lab")
    from ..lab.compare.comparison import load_comparison
    from ..lab.compare.run import compare
    from ..lab.report import read_results, results_json, summary
    from ..lab.written import split_names

    given = vars(options)
    comparison = load_comparison(
        options.comparison,
        arms=None if options.encodings is None else split_names(options.encodings),
        seeds=options.seeds,
        tasks=[] if options.tasks == "none" else _listed(options.tasks),
        budgets=_numbers("--budgets", options.budgets, int),
        sweep=_rates(options.sweep),
        overrides={name: given[name] for name in options.unknown_settings if name in given},
    )
    out = Path(options.out or Path("results") / Path(options.comparison).stem)
    report = compare(
        comparison, out, on=options.on, side_by_side=options.jobs, threads=options.threads,
        gpus=options.gpus_per_job, slurm=_pairs(options.slurm), quiet=options.quiet or options.json,
        start=options.start,
    )  # fmt: skip
    results = read_results([out])
    if options.json:
        print(json.dumps({**results_json(results), "report": str(report)}))
    else:
        print(f"{summary(results)}\nReport: {report}")
    return OK


def _pairs(given: list[str]) -> dict[str, str]:
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals and value):
            raise CommandError(f"--slurm takes KEY=VALUE, as in --slurm partition=gpu; got {each!r}")
    return dict(each.split("=", 1) for each in given)


def _rates(text: str | None) -> list[float] | None:
    if text is None or text == "none":
        return None if text is None else []
    name, equals, values = text.partition("=")
    if name != "train.lr" or not equals:
        raise CommandError(f"--sweep takes train.lr and its values, as in train.lr=2e-3,4e-3; got {text!r}")
    return _numbers("--sweep", values, float)


def _numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> list[Number] | None:
    if text is None or text == "none":
        return None if text is None else []
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError:
        raise CommandError(f"{option} takes numbers separated by commas, got {text!r}") from None


def _listed(text: str | None) -> list[str] | None:
    from ..lab.written import split_names

    return None if text is None else split_names(text)
