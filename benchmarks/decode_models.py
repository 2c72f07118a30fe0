"""Decoding through whole models: milliseconds a token against stock transformers, as ratios in one run.

    grape bench decode_models [--models adapted ours] [--contexts 64 1024 8192] [--batches 1 8] [--profile]

`adapted`: a Llama of SmolLM2-135M's shape (random weights) with other encodings; biases at amplitude 1.
`ours`: GrapeForCausalLM, 6 layers of width 512, against LlamaForCausalLM of the same shape.
A step is one forward pass with what `generate` passes (one token, attention_mask, position_ids, the cache). The
contestants take turns, a token each; a ratio is the median over rounds of the time to the baseline's in the same
round, with its quartiles. The prompt goes through the model once (timed: prefill) and is repeated for larger batches.
Before anything is timed, the logits of cached steps are compared with those of the model without a cache.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from grape_pe.attention.pruning import record_pruning
from grape_pe.hf import GrapeConfig, GrapeForCausalLM, adapt
from grape_pe.hf.fade import ZeroInitBias

STOCK = "stock"
ADAPTED = ("rope", "grape-m", "rope+fox", "rope+grape-a-qk", "rope+grape-ap")
OURS = ("rope", "alibi", "fox", "grape-a-qk", "grape-ap")
SMOL = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1365}
WARM_UP = 3  # rounds that are not counted


@dataclass
class Contestant:
    """A model and its cache; `seconds` of its timed steps."""

    model: Any
    cache: Any = None
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    def fill(self, prompt: Tensor, batch: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        start = time.perf_counter()
        self.model(prompt, past_key_values=self.cache, logits_to_keep=1)
        self.prefill.append(time.perf_counter() - start)
        if batch > 1:
            self.cache.batch_repeat_interleave(batch)

    def step(self, token: Tensor) -> Tensor:
        """One token, with the arguments `generate` passes."""
        seen = self.cache.get_seq_length()
        mask = torch.ones(token.shape[0], seen + 1, dtype=torch.long)
        where = torch.full((token.shape[0], 1), seen)
        return self.model(
            token, attention_mask=mask, position_ids=where, past_key_values=self.cache, logits_to_keep=1
        ).logits


def shared_copy(model: Any) -> Any:
    """A copy with the same parameters in memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def adapted(encodings: Sequence[str], layers: int = 30) -> dict[str, Contestant]:
    torch.manual_seed(0)
    sizes = {**SMOL, "num_hidden_layers": layers, "vocab_size": 49152, "max_position_embeddings": 1 << 20}
    stock = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    models = {STOCK: stock}
    for name in encodings:
        models[name] = adapt(shared_copy(stock), name, train="all").eval()
        for part in models[name].modules():
            if isinstance(part, ZeroInitBias):
                part.amplitude.fill_(1.0)
    return {name: Contestant(model) for name, model in models.items()}


def ours(encodings: Sequence[str], layers: int = 6) -> dict[str, Contestant]:
    torch.manual_seed(0)
    sizes = {**SMALL, "num_hidden_layers": layers, "vocab_size": 8192}
    stock = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, max_position_embeddings=1 << 20))
    models: dict[str, Any] = {STOCK: stock.eval()}
    for name in encodings:
        torch.manual_seed(0)
        models[name] = GrapeForCausalLM(GrapeConfig(**sizes, encoding=name)).eval()
    return {name: Contestant(model) for name, model in models.items()}


MAKERS = {"adapted": (adapted, ADAPTED, 49152), "ours": (ours, OURS, 8192)}


def random_tokens(vocabulary: int, *size: int) -> Tensor:
    return torch.randint(0, vocabulary, size, generator=torch.Generator().manual_seed(sum(size)))


def check(kind: str, encodings: Sequence[str], length: int) -> None:
    """Two layers: a prompt and two cached steps against the whole sequence without a cache."""
    make, _, vocabulary = MAKERS[kind]
    ids = random_tokens(vocabulary, 1, length + 2)
    for name, contestant in make(encodings, layers=2).items():
        contestant.fill(ids[:, :length], 1)
        got = torch.cat([contestant.step(ids[:, length + i : length + i + 1]) for i in range(2)], 1)
        want = contestant.model(ids, use_cache=False, logits_to_keep=2).logits
        error = ((got - want).norm() / want.norm()).item()
        assert error < 1e-5, f"{name} ({kind}) decodes something else than it computes at once: {error:.1e}"


def measure(group: dict[str, Contestant], prompt: Tensor, batch: int, rounds: int) -> None:
    for turn in range(1 if prompt.shape[1] > 1024 else 3):
        for contestant in group.values():
            if turn == 0:
                contestant.seconds, contestant.prefill = [], []
            contestant.fill(prompt, batch)
    if prompt.shape[1] <= 1024:  # the first one warmed up
        for contestant in group.values():
            contestant.prefill.pop(0)
    tokens = random_tokens(8192, rounds + WARM_UP, batch, 1)
    for turn, token in enumerate(tokens):
        for contestant in group.values():
            start = time.perf_counter()
            contestant.step(token)
            if turn >= WARM_UP:
                contestant.seconds.append(time.perf_counter() - start)


def skipped(contestant: Contestant, batch: int) -> float:
    """The part of the keys that one more step does not read."""
    with record_pruning() as report:
        contestant.step(torch.zeros(batch, 1, dtype=torch.long))
    return report.fraction


def to_baseline(mine: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios within rounds."""
    each = sorted(a / b for a, b in zip(mine, base, strict=True))
    return statistics.median(each), each[len(each) // 4], each[3 * len(each) // 4]


def report(kind: str, group: dict[str, Contestant], context: int, batch: int) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{kind}, context {context}, batch {batch}")
    for name, contestant in group.items():
        ratio, low, high = to_baseline(contestant.seconds, group[STOCK].seconds)
        row = {
            "models": kind, "context": context, "batch": batch, "name": name, "ratio": ratio, "low": low,
            "high": high, "ms": 1e3 * statistics.median(contestant.seconds),
            "prefill_ms": 1e3 * statistics.median(contestant.prefill), "skipped": skipped(contestant, batch),
            "to_rope": to_baseline(contestant.seconds, group["rope"].seconds)[0] if "rope" in group else None,
        }  # fmt: skip
        rope = "" if row["to_rope"] is None else f"  {row['to_rope']:5.2f}x rope"
        print(
            f"  {name:<16}{row['ms']:9.2f} ms  {ratio:5.2f}x stock [{low:.2f}, {high:.2f}]{rope}"
            f"  prefill {row['prefill_ms']:8.1f} ms  keys skipped {row['skipped']:.0%}",
            flush=True,
        )
        rows.append(row)
    return rows


def profile(kind: str, group: dict[str, Contestant], prompt: Tensor) -> None:
    """Calls of torch's operators, reads of values by the host and calls of Python functions in a step."""
    token = torch.zeros(1, 1, dtype=torch.long)
    print(f"\n{kind}: calls in a one-token step after {prompt.shape[1]} tokens")
    for name, contestant in group.items():
        contestant.fill(prompt, 1)
        contestant.step(token)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            contestant.step(token)
        events = [event for event in trace.events() if event.name.startswith("aten::")]
        outer = sum(event.cpu_parent is None for event in events)  # called from Python, not from another
        reads = sum(event.name == "aten::_local_scalar_dense" for event in events)
        python = cProfile.Profile()
        python.runcall(contestant.step, token)
        layers, calls = contestant.model.config.num_hidden_layers, pstats.Stats(python).total_calls
        print(
            f"  {name:<16}{outer / layers:7.1f} torch and {calls / layers:7.1f} Python calls a layer, "
            f"{reads} values read"
        )


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MAKERS), default=list(MAKERS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--encodings", nargs="+", help="instead of those above, for every model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="count calls in a step instead")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args(argv)
    rows = []
    print(f"float32, {torch.get_num_threads()} threads, {options.rounds} rounds")
    for kind in options.models:
        make, default, vocabulary = MAKERS[kind]
        encodings = options.encodings or default
        check(kind, encodings, 2100 if max(options.contexts) > 2048 else 64)
        group = make(encodings)
        for context in options.contexts:
            prompt = random_tokens(vocabulary, 1, context)
            if options.profile:
                profile(kind, group, prompt)
                continue
            for batch in options.batches:
                measure(group, prompt, batch, options.rounds)
                rows += report(kind, group, context, batch)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
