"""`grape compare`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..extras import require
from .errors import OK
from .parsers import Commands, add_command, names, natural, numbers, or_none, positive
from .train import add_settings

PROBE = "probe."
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
    add = parser.option
    add("comparison", "WHAT", "a shipped comparison or a file")
    add("--encodings", "NAMES", "such as 'rope,fox[forget_bias=4]+kv'; +kv adds KV-shift", type=names)
    add("--seeds", "N", "number of seeds", type=positive)
    add("--tasks", "NAMES", "probes, separated by commas, or none", type=or_none(names))
    add("--budgets", "N,N", "also measure the loss after so many tokens, or none", type=or_none(numbers))
    about = "learning rates to try on seed 0, or none; each encoding keeps its best"
    add("--sweep", "train.lr=A,B", about, type=or_none(rates))
    add("--out", "DIR", "results (default: results/WHAT)", type=Path)
    add("--from", "FILE", "continue from a file of grape report --jsonl", dest="start", type=Path)
    add("--on", "ENGINE", "local, ray, ray://HOST:PORT or slurm", "local")
    add("--jobs", "N", "parallel runs (default: as many as there is room for)", 0, positive)
    add("--threads", "N", "CPU threads per run (default: cores / --jobs; 1 on a cluster)", type=positive)
    add("--gpus-per-job", "N", "GPUs per run (default: 1 if there is one)", type=natural)
    add(
        "--slurm",
        "KEY=VALUE",
        "sbatch parameter; time=4:00:00 or the like is needed",
        [],
        pair,
        action="append",
    )
    parser.flag("--quiet")
    add_settings(parser, ("", PROBE))
    parser.flag("--json")


def rates(text: str) -> list[float]:
    name, _, values = text.partition("=")
    try:
        if name == "train.lr":
            return [float(part) for part in names(values)]
    except ValueError:
        pass
    raise ValueError("must be train.lr=RATE,RATE, as in train.lr=2e-3,4e-3")


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not (name and value):
        raise ValueError("must be KEY=VALUE, as in partition=gpu")
    return name, value


def run_compare(options: argparse.Namespace) -> int:
    require("pydantic", "lab")
    require("plotly", "lab")
    from ..lab.compare.comparison import load_comparison
    from ..lab.compare.run import compare
    from ..lab.report import read_results, results_json, summary

    given = vars(options)
    comparison = load_comparison(
        options.comparison, arms=options.encodings, seeds=options.seeds, tasks=options.tasks,
        budgets=options.budgets, sweep=options.sweep,
        overrides={name: given[name] for name in options.unknown_settings if name in given},
    )  # fmt: skip
    out = options.out or Path("results") / Path(options.comparison).stem
    report = compare(
        comparison, out, on=options.on, side_by_side=options.jobs, threads=options.threads,
        gpus=options.gpus_per_job, slurm=dict(options.slurm), quiet=options.quiet or options.json,
        start=options.start,
    )  # fmt: skip
    results = read_results([out])
    if options.json:
        print(json.dumps({**results_json(results), "report": str(report)}))
    else:
        print(f"{summary(results)}\nReport: {report}")
    return OK
