"""A tiny GPT that uses `grape.Attention` and has no position embeddings.

Needs torch only. It trains for a few seconds on the source of a Python module, byte by byte, and then generates
text with one cache per layer.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grape_pe as grape

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, STEPS = 64, 4, 2, 64, 16, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = grape.Attention(WIDTH, HEADS, encoding="rope+fox")  # instead of CausalSelfAttention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cache: grape.StreamingCache | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache=cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)  # and no embedding of positions
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, caches: list[grape.StreamingCache] | None = None) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int) -> bytes:
        caches = [block.attn.cache() for block in self.blocks]
        new, out = torch.tensor([list(prompt)]), list(prompt)
        for _ in range(count):
            new = self(new, caches)[:, -1:].argmax(-1)  # the prompt, then one token at a time
            out.append(int(new))
        return bytes(out)


torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
model = GPT()
adam = torch.optim.AdamW(model.parameters(), 3e-3)
losses = []
for _ in range(STEPS):
    rows = torch.stack([text[i : i + CONTEXT + 1] for i in torch.randint(len(text) - CONTEXT, (BATCH,))])
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    adam.zero_grad()
    loss.backward()
    adam.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps")
print(f"generated: {model.generate(b'def ', 40)!r}")
