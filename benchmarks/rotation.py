"""Applying a rotation to q and k: every GRAPE-M form and LieRE against Hugging Face's RoPE.

    python benchmarks/rotation.py [--tokens 4096] [--rounds 12] [--json FILE]

Correctness first (norms and, for grape-m, equality with RoPE), then time, interleaved in one run:
each round times every contestant once, forward and forward + backward, and what is reported is the
median of its ratios to RoPE in the same round, with the spread. Everything that depends on positions
is inside the clock, for everyone: angles, cosines, exponentials.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import grape_pe as grape
from grape_pe import testing

HEADS, DIM, WIDTH = 8, 64, 512
FORMS: dict[str, dict] = {
    "grape-m": {},
    "grape-m-ctx": {},
    "grape-m-basis": {},
    "grape-m-plane": {},
    "grape-m-mix": {"rank": 8},
}
Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def huggingface_rope(tokens: int) -> Apply:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, max_position_embeddings=tokens)
    rotary = LlamaRotaryEmbedding(config)
    return lambda q, k, x, positions: apply_rotary_pos_emb(q, k, *rotary(x, positions[None]))


def ours(name: str, options: dict) -> Apply:
    enc = grape.build(name, heads=HEADS, head_dim=DIM, width=WIDTH, **options)

    def apply(q: Tensor, k: Tensor, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        code = enc(q, k, x=x, positions=positions)
        return code.q, code.k

    return apply


def liere_float32() -> Apply:
    """As published: matrix_exp in float32 for each token, one dense generator for all heads."""
    weight = torch.nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)

    def apply(q: Tensor, k: Tensor, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.linalg.matrix_exp(positions.float()[:, None, None] * (weight - weight.T))
        return (turn @ q.unsqueeze(-1)).squeeze(-1), (turn @ k.unsqueeze(-1)).squeeze(-1)

    return apply


def seconds(apply: Apply, data: testing.Sample, backward: bool) -> float:
    q, k = (t.detach().requires_grad_(backward) for t in (data.q, data.k))
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        turned = apply(q, k, data.x, data.positions)
    if backward:
        torch.autograd.backward(turned, (data.q, data.k))
    return time.perf_counter() - start


def check(contestants: dict[str, Apply], data: testing.Sample) -> None:
    with torch.no_grad():
        rope = contestants["rope (HF)"](data.q, data.k, data.x, data.positions)
        for name, apply in contestants.items():
            q, _ = apply(data.q, data.k, data.x, data.positions)
            apart = (q.norm(dim=-1) / data.q.norm(dim=-1) - 1).abs().max()
            limit = 1e-2 if name == "liere" else 1e-5  # matrix_exp in float32 drifts at far positions
            assert apart < limit, f"{name} changes lengths by {apart:.1e}"
            if name == "grape-m":  # theirs rounds angles to float32
                limit = 4 * data.q.shape[2] * torch.finfo(torch.float32).eps
                assert (q - rope[0]).abs().max() < limit * data.q.abs().max(), "grape-m is not RoPE"


def measure(tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    torch.manual_seed(0)
    contestants = {"rope (HF)": huggingface_rope(tokens)}
    contestants |= {name: ours(name, options) for name, options in FORMS.items()}
    contestants["liere"] = liere_float32()
    data = testing.sample(grape.build("fox", heads=HEADS, head_dim=DIM, width=WIDTH), batch=1, tokens=tokens)
    check(contestants, data)
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in contestants}
    for turn in range(rounds + 2):
        for name, apply in contestants.items():
            if name == "liere" and turn != 2:
                continue  # tens of seconds a round: one tells enough
            for phase in ("forward", "both"):
                spent = seconds(apply, data, backward=phase == "both")
                if turn >= 2:
                    times[name][phase].append(spent)
    return times


def ratios(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for name, phases in times.items():
        row = table[name] = {}
        for phase, spent in phases.items():
            base = times["rope (HF)"][phase]
            each = sorted(mine / theirs for mine, theirs in zip(spent, base, strict=False))
            row[f"{phase}_ms"] = 1e3 * statistics.median(spent)
            row[f"{phase}_ratio"] = statistics.median(each)
            row[f"{phase}_low"], row[f"{phase}_high"] = each[len(each) // 4], each[(3 * len(each)) // 4]
    return table


def cell(row: dict[str, float], phase: str) -> str:
    spread = f"[{row[f'{phase}_low']:.2f}, {row[f'{phase}_high']:.2f}]"
    return f"{row[f'{phase}_ms']:8.1f} ms {row[f'{phase}_ratio']:6.2f}x {spread}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args(argv)
    table = ratios(measure(options.tokens, options.rounds))
    print(f"B=1 H={HEADS} T={options.tokens} D={DIM} float32, {torch.get_num_threads()} threads")
    print(f"{'':<14}{'forward':>24}{'forward + backward':>30}")
    for name, row in table.items():
        cells = [cell(row, phase) for phase in ("forward", "both")]
        print(f"{name:<14}" + "  ".join(cells))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"tokens": options.tokens, "torch": torch.__version__, "table": table}, file, indent=2)


if __name__ == "__main__":
    main()
