"""Training a recipe: tokens a second per encoding, as ratios to rope in one run, and what the loader costs.

    grape bench train [--recipe small] [--encodings rope fox] [--rounds 20] [--threads 2] [--json FILE]

A step is what the trainer does: forward, backward, clipping, AdamW. Contestants take turns, a step each, so
that a change of the machine's speed hits them all; a ratio is the median over rounds of seconds to rope's in
the same round, with its quartiles. Then rope, whose steps are the shortest, runs alone: loading is the time
it waits for its next batch, read ahead by a thread, as a share of its steps. Before anything is timed, each
encoding's first loss is compared with that of a plain loop without the trainer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grape_pe.lab.config import RunConfig, load
from grape_pe.lab.data import Batch, prefetch
from grape_pe.lab.train.distributed import World
from grape_pe.lab.train.feed import Feed, open_feed
from grape_pe.lab.train.optimization import initialise, learning_rate
from grape_pe.lab.train.signals import StopSignals
from grape_pe.lab.train.trainer import Trainer
from grape_pe.models import Decoder

ENCODINGS = (
    "rope", "alibi", "fox", "grape-m", "grape-m-ctx", "grape-a-q", "grape-a-k", "grape-a-qk", "grape-ap",
)  # fmt: skip
LOADING_GOAL = 0.02
WARM_UP = 3  # rounds that are not counted
TOLERANCE = 1e-4


@dataclass
class Contestant:
    """A trainer, its batches read ahead, and the seconds of its steps."""

    trainer: Trainer
    coming: Iterator[tuple[int, list[Batch]]]
    signals: StopSignals
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def step(self) -> float:
        """One step; returns its loss."""
        began = time.perf_counter()
        number, parts = next(self.coming)
        waited = time.perf_counter() - began
        rate = learning_rate(number, self.trainer.config.train)
        self.trainer._update(number, parts, rate, self.signals)
        self.trainer._read()
        self.steps.append(time.perf_counter() - began)
        self.waits.append(waited)
        return self.trainer.last.loss


def contestant(config: RunConfig, feed: Feed, directory: Path, stack: ExitStack) -> Contestant:
    directory.mkdir(parents=True)
    trainer = Trainer(config, directory, feed, World(), quiet=True)
    if trainer.metrics is not None:
        stack.callback(trainer.metrics.close)
    coming = stack.enter_context(prefetch(feed.batches, range(config.train.steps), trainer._rows))
    return Contestant(trainer, coming, StopSignals())


def configurations(recipe: str, encodings: Sequence[str], steps: int) -> dict[str, RunConfig]:
    changes: dict[str, Any] = {"log.tensorboard": False, "train.steps": max(steps, 2), "train.warmup": 1}
    return {name: load(recipe, {**changes, "model.encoding": name}) for name in encodings}


def check(name: str, found: float, config: RunConfig, feed: Feed) -> None:
    """The first loss, against a model, a batch and a cross-entropy put together by hand."""
    model = Decoder(config.model.decoder(feed.batches.vocab_size))
    initialise(model, config.seed)
    batch = feed.batches.batch(0, range(config.train.batch))
    with torch.no_grad():
        logits = model(batch.tokens, documents=batch.documents).float()
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    assert abs(found - want) < TOLERANCE, f"{name} trains on a loss of {found}, by hand it is {want}"


def measure(configs: dict[str, RunConfig], rounds: int) -> tuple[list[dict[str, Any]], float]:
    """A row for each encoding, and the share of loading."""
    feed = open_feed(next(iter(configs.values())), World())
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        runners = {
            name: contestant(config, feed, Path(scratch) / name, stack) for name, config in configs.items()
        }
        for name, runner in runners.items():
            check(name, runner.step(), configs[name], feed)
        print(f"torch {torch.__version__}: the first losses agree with a plain loop")
        for _ in range(WARM_UP + rounds):
            for runner in runners.values():
                runner.step()
        return rows(runners, rounds), loading(runners["rope"], rounds)


def loading(runner: Contestant, rounds: int) -> float:
    """The share of its steps that a run alone waits for data; between turns all would be read ahead."""
    for _ in range(WARM_UP + rounds):
        runner.step()
    return sum(runner.waits[-rounds:]) / sum(runner.steps[-rounds:])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], statistics.median(ordered), ordered[3 * len(ordered) // 4]


def rows(runners: dict[str, Contestant], rounds: int) -> list[dict[str, Any]]:
    rope = runners["rope"].steps[-rounds:]
    tokens = runners["rope"].trainer.config.tokens_per_step
    out = []
    for name, runner in runners.items():
        steps = runner.steps[-rounds:]
        low, ratio, high = quartiles([mine / base for mine, base in zip(steps, rope, strict=True)])
        seconds = statistics.median(steps)
        out.append(
            {"encoding": name, "seconds": seconds, "tokens_per_second": tokens / seconds, "to_rope": ratio,
             "low": low, "high": high}
        )  # fmt: skip
    return out


def report(found: list[dict[str, Any]], share: float) -> None:
    print(f"{'':<14}{'ms a step':>10}{'tokens/s':>10}{'time to rope':>14}")
    for row in found:
        print(
            f"{row['encoding']:<14}{1e3 * row['seconds']:10.1f}{row['tokens_per_second']:10,.0f}"
            f"{row['to_rope']:14.2f}  [{row['low']:.2f}, {row['high']:.2f}]"
        )
    verdict = "met" if share <= LOADING_GOAL else "missed"
    print(f"loading: {share:.2%} of a step of rope; goal <= {LOADING_GOAL:.0%}: {verdict}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="grape bench train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="small", help="whose model, data and batch (default: small)")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), help="any of grape.names()")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each that count (default: 20)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    names = list(dict.fromkeys(["rope", *options.encodings]))
    configs = configurations(options.recipe, names, 1 + 2 * (WARM_UP + options.rounds))
    found, share = measure(configs, options.rounds)
    tokens, threads = configs["rope"].tokens_per_step, torch.get_num_threads()
    print(f"{options.recipe}: {tokens:,} tokens a step, {threads} threads")
    report(found, share)
    if options.json:
        about = {"torch": torch.__version__, "threads": threads, "recipe": options.recipe}
        Path(options.json).write_text(json.dumps({**about, "loading": share, "rows": found}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
