"""A training step of a small language model, per encoding: time and peak memory, as ratios in one run.

    grape bench model [--lengths 1024 4096] [--encodings rope fox grape-ap] [--rounds 3] [--json FILE]

4 layers, width 256, 4 heads, vocabulary 8192, float32, 4096 tokens a step (forward, backward, no optimizer).
Ratios are to our own rope and to transformers' LlamaForCausalLM of the same shape. Contestants take turns, so
that a change of the machine's speed hits them all; the median counts. Peak memory is of a fresh process each.
Before anything is timed, every model's loss is compared with the same model on the reference attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from grape_pe.models import Decoder, DecoderConfig

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 4, 256, 4, 8192, 4096
ENCODINGS = ("rope", "grape-m", "alibi", "fox", "grape-a-qk", "grape-ap")
GOALS = {"alibi": 1.1, "fox": 1.1, "grape-a-q": 1.1, "grape-a-k": 1.1, "grape-a-qk": 1.1, "grape-ap": 1.5}
GOAL_TO_LLAMA = 0.9
LLAMA = "transformers llama"
Step = Callable[[], float]


def batch(length: int) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (TOKENS // length, length + 1), generator=torch.Generator().manual_seed(0)
    )


def config(encoding: str) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS, encoding=encoding, qk_norm=True
    )


def ours(encoding: str, length: int) -> Step:
    torch.manual_seed(0)
    model, ids = Decoder(config(encoding)), batch(length)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(ids[:, :-1], targets=ids[:, 1:])
        loss.backward()
        return loss.item()

    return step


def llama(length: int) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = config("rope")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=shape.hidden,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, tie_word_embeddings=True,
        )
    )  # fmt: skip
    ids = batch(length)[:, :-1]
    model.train()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    return step


def contestant(name: str, length: int) -> Step:
    return llama(length) if name == LLAMA else ours(name, length)


def check(encodings: Sequence[str]) -> None:
    """Loss and gradients against the same model on the reference attention."""
    from grape_pe.cache import seen

    ids = batch(512)[:1, :257]
    usual = seen.attend
    for name in encodings:
        torch.manual_seed(0)
        model = Decoder(config(name))
        fast = _gradients(model, ids)
        seen.attend = lambda *a, **k: usual(*a, **{**k, "impl": "reference"})  # type: ignore[assignment]
        try:
            slow = _gradients(model, ids)
        finally:
            seen.attend = usual
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _gradients(model: Decoder, ids: Tensor) -> list[Tensor]:
    loss = model(ids[:, :-1], targets=ids[:, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def seconds(names: Sequence[str], length: int, rounds: int) -> dict[str, float]:
    steps = {name: contestant(name, length) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def megabytes(name: str, length: int) -> float:
    """Peak resident memory of two steps, less that of a process which only built the model."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import model; model.peak({name!r}, {length})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def peak(name: str, length: int) -> None:
    """In a process of its own: print how far two steps raise the peak of resident memory."""
    step = contestant(name, length)
    before = _high_water()
    step()
    step()
    print(_high_water() - before)


def _high_water() -> float:
    """Peak resident memory in MB; of this program only, unlike getrusage after a fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def report(length: int, times: dict[str, float], memory: dict[str, float]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"\nT = {length}, {TOKENS} tokens a step, {torch.get_num_threads()} threads")
    print(f"{'':<20}{'seconds':>9}{'to rope':>9}{'to llama':>10}{'MB':>8}{'to llama':>10}   goal at 4096")
    for name, taken in times.items():
        to_rope, to_llama = taken / times["rope"], taken / times[LLAMA]
        lean = memory[name] / memory[LLAMA]
        print(
            f"{name:<20}{taken:9.3f}{to_rope:9.2f}{to_llama:10.2f}{memory[name]:8.0f}{lean:10.2f}"
            f"   {_verdict(name, to_rope, to_llama) if length == 4096 else ''}"
        )
        rows.append(
            {"length": length, "name": name, "seconds": taken, "to_rope": to_rope, "to_llama": to_llama,
             "megabytes": memory[name], "memory_to_llama": lean}
        )  # fmt: skip
    return rows


def _verdict(name: str, to_rope: float, to_llama: float) -> str:
    if name == "rope":
        return f"<= {GOAL_TO_LLAMA} of llama: {'met' if to_llama <= GOAL_TO_LLAMA else 'missed'}"
    if name in GOALS:
        return f"<= {GOALS[name]} of rope: {'met' if to_rope <= GOALS[name] else 'missed'}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grape bench model", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), help="any of grape.names()")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    names = list(dict.fromkeys([LLAMA, "rope", *options.encodings]))
    check(names[1:])
    print(f"torch {torch.__version__}: losses and gradients agree with the reference")
    rows: list[dict[str, object]] = []
    for length in options.lengths:
        times = seconds(names, length, options.rounds)
        rows += report(length, times, {name: megabytes(name, length) for name in names})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
