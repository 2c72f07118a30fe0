"""Decoding: milliseconds a token with a long cache, per encoding, as ratios in one run.

    python benchmarks/decode.py [--encodings NAME …] [--contexts 1024 8192 65536] [--batches 1 8] [--json FILE]

One attention layer, 8 heads of 64. Each round, every contestant appends one token to its own cache and
attends from it. Contestants: our cache with each encoding; rope through Hugging Face's `DynamicCache` and
torch's attention; and (to 8192) rope with everything recomputed. The first output is checked against the
reference before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import grape_pe as grape

HEADS, DIM, WIDTH = 8, 64, 512
ENCODINGS = ("rope", "alibi", "fox", "grape-a-qk", "grape-ap", "t5", "kerple-log", "relative")
CHUNK = 4096
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def tokens(batch: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, HEADS, count, DIM, generator=generator) for _ in range(3))
    return q, k, v, torch.randn(batch, count, WIDTH, generator=generator)


def ours(name: str, batch: int, context: int, capacity: int) -> Step:
    torch.manual_seed(0)
    enc = grape.build(name, heads=HEADS, head_dim=DIM, width=WIDTH)
    cache = grape.StreamingCache(enc, capacity=capacity)
    for start in range(0, context, CHUNK):
        q, k, v, x = tokens(batch, min(CHUNK, context - start), start)
        cache.append(q, k, v, x=x)
    return lambda q, k, v, x: cache.attend(q, k, v, x=x)


def huggingface(batch: int, context: int) -> Step:
    from transformers import DynamicCache, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, max_position_embeddings=2 * context
    )
    rotary, cache = LlamaRotaryEmbedding(config), DynamicCache(config=config)

    def step(q: Tensor, k: Tensor, v: Tensor, x: Tensor, attend: bool = True) -> Tensor:
        start = cache.get_seq_length()
        where = torch.arange(start, start + q.shape[2])[None]
        q, k = apply_rotary_pos_emb(q, k, *rotary(x, where))
        keys, values = cache.update(k, v, 0)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values) if attend else q

    for start in range(0, context, CHUNK):
        step(*tokens(batch, min(CHUNK, context - start), start), attend=False)
    return step


def recompute(batch: int, context: int) -> Step:
    enc = grape.build("rope", heads=HEADS, head_dim=DIM, width=WIDTH)
    q, k, v, _ = tokens(batch, context, 0)

    def step(*_: Tensor) -> Tensor:
        code = enc(q, k)
        return grape.attend(code.q, code.k, v)

    return step


def check(names: Sequence[str]) -> None:
    """Every contestant's cache against the reference on a short stream."""
    for name in names:
        torch.manual_seed(0)
        enc = grape.build(name, heads=HEADS, head_dim=DIM, width=WIDTH)
        q, k, v, x = tokens(1, 2200, 1)
        cache = grape.StreamingCache(enc)
        cache.append(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], x=x[:, :-1])
        got = cache.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], x=x[:, -1:])
        code = enc(q, k, x=x)
        bias = code.bias.queries(slice(2199, 2200))
        want = grape.attend(code.q[:, :, -1:], code.k, v, bias=bias, impl="reference")
        assert (got - want).abs().max() < 1e-5, f"{name} decodes something else than it trains"


def measure(names: Sequence[str], context: int, batch: int, rounds: int) -> dict[str, list[float]]:
    steps: dict[str, Step] = {name: ours(name, batch, context, context + rounds + 2) for name in names}
    steps["rope (HF DynamicCache)"] = huggingface(batch, context)
    if context <= 8192 and batch == 1:
        steps["rope (recomputed)"] = recompute(batch, context)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        q, k, v, x = tokens(batch, 1, 10**6 + turn)
        for name, step in steps.items():
            if name.endswith("(recomputed)") and turn > 4:
                continue
            start = time.perf_counter()
            step(q, k, v, x)
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def report(context: int, batch: int, times: dict[str, list[float]]) -> list[dict]:
    rows = []
    print(f"\ncontext {context}, batch {batch}")
    for name, spent in times.items():
        each = sorted(mine / rope for mine, rope in zip(spent, times["rope"], strict=False))
        row = {"context": context, "batch": batch, "name": name, "ms": statistics.median(spent)}
        low, high = each[len(each) // 4], each[3 * len(each) // 4]
        row |= {"ratio": statistics.median(each), "low": low, "high": high}
        print(f"  {name:<24}{row['ms']:9.3f} ms  {row['ratio']:6.2f}x rope [{low:.2f}, {high:.2f}]")
        rows.append(row)
    return rows


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--encodings", nargs="+", default=list(ENCODINGS), metavar="NAME", help="besides rope"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args(argv)
    names = list(dict.fromkeys(["rope", *options.encodings]))
    check(names)
    print(f"milliseconds a token, {HEADS} heads of {DIM}, float32, {torch.get_num_threads()} threads")
    rows = []
    for context in options.contexts:
        for batch in options.batches:
            rows += report(context, batch, measure(names, context, batch, options.rounds))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
