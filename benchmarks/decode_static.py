"""Compiled decoding: milliseconds a token with a growing cache, a static cache, and a static cache and torch.compile.

    grape bench decode_static [--encodings stock rope fox] [--contexts 64 1024]

Models of 6 layers of width 512, batch 1; `stock` is LlamaForCausalLM of the same shape. A step is one forward pass of
one token. The contestants take turns, a token each; medians over rounds. The static cache has room for 64 more
tokens than the context. Before anything is timed, the logits of all contestants of a model are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from grape_pe.hf import GrapeConfig, GrapeForCausalLM

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1365}
SIZES |= {"num_hidden_layers": 6, "vocab_size": 8192}
WARM_UP = 3  # rounds that are not counted


@dataclass
class Contestant:
    """A model, how its steps are called, and its cache."""

    model: Any
    call: Callable[..., Any]
    cache: Any
    seen: int
    seconds: list[float] = field(default_factory=list)

    def step(self, token: Tensor) -> Tensor:
        where = torch.full((1, 1), self.seen)
        self.seen += 1
        start = time.perf_counter()
        logits = self.call(token, position_ids=where, past_key_values=self.cache, logits_to_keep=1).logits
        self.seconds.append(time.perf_counter() - start)
        return logits  # type: ignore[no-any-return]


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "stock":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    return GrapeForCausalLM(GrapeConfig(**SIZES, encoding=name)).eval()


def contestants(model: Any, prompt: Tensor) -> dict[str, Contestant]:
    """Dynamic, static, compiled; each with its cache filled."""
    length = prompt.shape[1]
    compiled = torch.compile(model, fullgraph=True)
    found = {}
    for name, call in (("dynamic", model), ("static", model), ("compiled", compiled)):
        cache = (
            DynamicCache(config=model.config)
            if name == "dynamic"
            else StaticCache(config=model.config, max_cache_len=length + 64)
        )
        model(prompt, past_key_values=cache, logits_to_keep=1)
        found[name] = Contestant(model, call, cache, length)
    return found


def measure(name: str, context: int, rounds: int) -> dict[str, float]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(context)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, context + rounds + WARM_UP), generator=generator)
    group = contestants(build(name), tokens[:, :context])
    for token in tokens[:, context:].split(1, 1):
        logits = [contestant.step(token) for contestant in group.values()]
        for other in logits[1:]:
            torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-4)
    return {kind: 1e3 * statistics.median(each.seconds[WARM_UP:]) for kind, each in group.items()}


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encodings", nargs="+", default=["stock", "rope", "fox"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args(argv)
    for context in given.contexts:
        for name in given.encodings:
            times = measure(name, context, given.rounds)
            shown = "  ".join(f"{kind} {ms:6.2f} ms" for kind, ms in times.items())
            print(f"context {context:5}  {name:<12} {shown}", flush=True)


if __name__ == "__main__":
    main()
