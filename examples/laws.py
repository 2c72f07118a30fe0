"""Measure the relative law of every encoding: how much do scores change when all positions are shifted?"""

import torch

import grape_pe as grape
from grape_pe import testing

print(
    f"{'encoding':<14} {'parameters':>10}   largest change of a logit when positions shift by 2^20 (float32)"
)
for name in grape.names():
    torch.manual_seed(0)
    enc = grape.build(name, heads=4, head_dim=32, width=64)
    data = testing.sample(enc)
    shift = 2**20 if name != "liere" else 2**10
    with torch.no_grad():
        moved = testing.scores(enc, data.at(data.positions + shift))
        change = (moved - testing.scores(enc, data)).tril().abs().max()
    note = "by design: " + enc.breaks_relative_law.split(",")[0] if enc.breaks_relative_law else ""
    note = "(shifted by 2^10)" if name == "liere" else note
    print(f"{name:<14} {sum(p.numel() for p in enc.parameters()):>10}   {change:.1e}  {note}")
