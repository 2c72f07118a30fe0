"""Command line of the fuzzers: `python -m grape_pe.testing.fuzz attend --seconds 60`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter

import torch

from .runner import Summary, run

TARGETS = ("attend", "streaming")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.cases is None and options.seconds is None:
        options.seconds = 60.0
    torch.set_num_threads(1)  # faster for small problems
    command = f"python -m grape_pe.testing.fuzz {options.target}"
    summary = run(
        importlib.import_module(f"{__package__}.{options.target}").check,
        cases=options.cases,
        seconds=options.seconds,
        seed=options.seed,
        keep_going=options.keep_going,
        progress=_Progress(options.target),
    )
    print(f"\n{options.target}: {summary}, seeds {options.seed} to {options.seed + summary.cases - 1}")
    for message, count in summary.refused.most_common(options.refusals):
        print(f"  refused {count} times: {message}")
    for found, text in _one_of_each(summary.failures).items():
        print(f"\n{text}\nreproduce: {command} --seed {found} --cases 1")
    return 1 if summary.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m grape_pe.testing.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS, help="what to compare with a dense computation")
    parser.add_argument("--cases", type=int, help="stop after this many cases")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds (60 if neither is given)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; each next one adds 1")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failing case")
    parser.add_argument("--refusals", type=int, default=8, help="how many kinds of refusal to list")
    return parser


class _Progress:
    """Prints a line on stderr, at most twice a second."""

    def __init__(self, target: str) -> None:
        self.target, self.next = target, 0.0

    def __call__(self, summary: Summary) -> None:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + 0.5
            print(f"\r{self.target}: {summary}", end="", file=sys.stderr, flush=True)


def _one_of_each(failures: dict[int, str]) -> dict[int, str]:
    """Choose at most three failures from each line of code."""
    places: Counter[str] = Counter()
    chosen = {}
    for seed, text in failures.items():
        first = text.split("\nThe above exception was the direct cause")[0]
        place = [line for line in first.splitlines() if line.startswith("  File")][-1]
        places[place] += 1
        if places[place] <= 3:
            chosen[seed] = text
    return chosen


if __name__ == "__main__":
    sys.exit(main())
