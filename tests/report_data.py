"""SYNTHETIC results for tests of the report: the numbers are drawn from formulas, nobody trained anything.

Only the pictures are real: they come from small untrained models of each encoding.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from grape_pe.lab.compare.arms import Arm
from grape_pe.lab.inspect.figure_data import picture
from grape_pe.lab.report.results import ArmResults, LanguageRun, Recipe, Results
from grape_pe.lab.report.stored import Evaluation
from grape_pe.models import Decoder, DecoderConfig

TRAIN_LENGTH = 256
STEPS = 600
TEXT = "SYNTHETIC : a grape vine climbs by its tendrils , and each new leaf finds the light it can reach ."
WORDS = TEXT.split()

ARMS = [
    {"label": "rope", "encoding": "rope", "kv_shift": False},
    {"label": "alibi", "encoding": "alibi", "kv_shift": False},
    {"label": "fox", "encoding": "fox", "kv_shift": False},
    {"label": "fox+kv", "encoding": "fox", "kv_shift": True},
    {"label": "grape-m", "encoding": "grape-m", "kv_shift": False},
    {"label": "grape-a-qk", "encoding": "grape-a-qk", "kv_shift": False},
    {"label": "grape-ap", "encoding": "grape-ap", "kv_shift": False},
    {"label": "grape-ap+kv", "encoding": "grape-ap", "kv_shift": True},
]
RECIPE = {
    "name": "synthetic",
    "seed": 0,
    "model": {"width": 128, "layers": 4, "heads": 4, "encoding": "rope"},
    "data": {"source": "builtin", "sequence": TRAIN_LENGTH},
    "train": {"steps": STEPS, "batch": 8, "lr": 3e-3},
}


def made_up(arms: dict[str, list[dict[str, Any]]]) -> Results:
    """Results without files: for each arm the fields of its evaluations, by seed."""
    found = []
    for label, runs in arms.items():
        each = [Evaluation.model_validate({"label": label, "seed": i, **run}) for i, run in enumerate(runs)]
        text = {run.seed: LanguageRun(run.seed, run) for run in each}
        found.append(ArmResults(label, Arm(label=label, encoding=label), 0, text))
    return Results(tuple(found), (Recipe("r", {}, (0,), {}, {}, ""),), (), ())


def write_synthetic(
    directory: Path,
    arms: list[dict[str, Any]] | None = None,
    seeds: tuple[int, ...] = (0, 1, 2),
    tasks: tuple[str, ...] = ("flip-flop", "passkey"),
    pictures: bool = True,
    recipe: dict[str, Any] | None = None,
) -> Path:
    """A finished comparison directory with made-up numbers."""
    arms = ARMS if arms is None else arms
    comparison = {
        "recipe": recipe or RECIPE,
        "arms": arms,
        "seeds": list(seeds),
        "tasks": list(tasks),
        "versions": {"grape-pe": "0", "torch": "2.13.0"},
        "machine": {"cores": 2, "device": "cpu", "name": "SYNTHETIC"},
        "command": "grape compare synthetic",
    }
    _write(directory / "compare.json", comparison)
    for index, arm in enumerate(arms):
        drawn = make_picture(arm["encoding"], arm["kv_shift"]) if pictures else None
        for seed in seeds:
            write_run(directory, arm, index, seed, drawn if seed == seeds[0] else None)
            for task in tasks:
                write_task(directory, arm, index, seed, task)
    return directory


def write_run(directory: Path, arm: dict[str, Any], index: int, seed: int, drawn: Any = None) -> Path:
    """One synthetic language run: evaluation, metrics and, if given, a picture."""
    rng = random.Random(f"{arm['label']} {seed}")
    run = directory / "runs" / f"{arm['label']}-s{seed}"
    final = 3.6 - 0.035 * index + 0.02 * seed + rng.gauss(0, 0.004)
    growth = {"rope": 0.9, "grape-m": 0.6}.get(arm["encoding"], -0.012 * index)
    evaluation = {
        "label": arm["label"], "encoding": arm["encoding"], "kv_shift": arm["kv_shift"], "seed": seed,
        "parameters": 1_310_720, "train_length": TRAIN_LENGTH, "val_loss": final,
        "by_position": _positions(final, growth, rng),
        "extrapolation": _lengths(final, growth, rng),
        "budgets": _budgets(final, index, rng), "lr": 3e-3, "sweep": _sweep(final, index),
        "tokens_per_second": 9000 - 500 * index + rng.gauss(0, 80), "peak_memory_bytes": 9e8 + 4e7 * index,
        "seconds": 170.0,
    }  # fmt: skip
    _write(run / "evaluation.json", evaluation)
    lines = []
    for step in range(10, STEPS + 1, 10):
        loss = final + 4 * math.exp(-step / 120) + rng.gauss(0, 0.03)
        lines.append({"kind": "train", "step": step, "loss": loss, "lr": 1e-3, "tokens": step * 2048})
        if step % 100 == 0:
            lines.append({"kind": "validation", "step": step, "loss": final + 3 * math.exp(-step / 130)})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if drawn is not None:
        _write(run / "picture.json", drawn)
    return run


def _positions(final: float, growth: float, rng: random.Random) -> dict[str, list[float]]:
    at = [2 ** (i / 3) for i in range(37)]
    beyond = [max(0.0, math.log2(p / TRAIN_LENGTH)) for p in at]
    loss = [final + 1.5 * p**-0.5 + growth * b + rng.gauss(0, 0.02) for p, b in zip(at, beyond, strict=True)]
    return {"position": at, "loss": loss}


def _budgets(final: float, index: int, rng: random.Random) -> list[dict[str, Any]]:
    """The gaps between arms are twice as large at 1M tokens as at 8M."""
    early = {
        n: final + 0.3 * k - 0.012 * index * k + rng.gauss(0, 0.004) for k, n in ((3, 1), (2, 2), (1, 4))
    }
    return [
        *({"tokens": n * 2**20, "loss": loss} for n, loss in early.items()),
        {"tokens": 2**23, "loss": final},
    ]


def _sweep(final: float, index: int) -> list[dict[str, Any]]:
    """The first arm is best at the edge."""
    rates = (1e-3, 3e-3, 1e-2)
    best = 2 if index == 0 else 1
    return [{"lr": lr, "loss": final + 0.1 * abs(i - best)} for i, lr in enumerate(rates)]


def _lengths(final: float, growth: float, rng: random.Random) -> list[dict[str, Any]]:
    texts = [random.Random(i).gauss(0, 0.3) for i in range(16)]
    out = []
    for times in (1, 2, 4, 8, 16):
        for window in (None, TRAIN_LENGTH):
            loss = final + (growth if window is None else 0.1 * growth) * math.log2(times)
            each = [loss + shift + rng.gauss(0, 0.02) for shift in texts]
            out.append(
                {"length": TRAIN_LENGTH * times, "window": window, "loss": sum(each) / 16, "stretches": each}
            )
    return out


def write_task(directory: Path, arm: dict[str, Any], index: int, seed: int, task: str) -> None:
    """Synthetic scores that fall with length, and with depth for passkey."""
    rng = random.Random(f"{arm['label']} {seed} {task}")
    scores = []
    for times in (1, 2, 4, 8, 16):
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0) if task == "passkey" else (None,):
            for split in ("",) if task == "passkey" else ("in-distribution", "sparse", "dense"):
                hard = (
                    math.log2(times) * (0.22 - 0.02 * index)
                    + (0.1 if split == "sparse" else 0)
                    + (1 - (depth or 1)) / 5
                )
                exact = min(1.0, max(0.0, 1 - hard + rng.gauss(0, 0.02)))
                scores.append(
                    {"task": task, "split": split, "length": 64 * times, "depth": depth, "exact": exact,
                     "token": (1 + exact) / 2, "samples": 100}
                )  # fmt: skip
    run = directory / "tasks" / task / f"{arm['label']}-s{seed}"
    _write(run / "evaluation.json", {"task": task, "label": arm["label"], "seed": seed, "scores": scores})


def make_model(encoding: str, kv_shift: bool = False, layers: int = 2, heads: int = 4) -> Decoder:
    """A real, small, untrained model."""
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(
            vocab_size=64, width=16 * heads, layers=layers, heads=heads, encoding=encoding, kv_shift=kv_shift
        )
    )


def make_picture(encoding: str, kv_shift: bool = False, tokens: int = 64) -> dict[str, Any]:
    row = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(1))
    return picture(make_model(encoding, kv_shift), row, [WORDS[i % len(WORDS)] for i in range(tokens)])


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
