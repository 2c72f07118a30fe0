"""Read models of llama2.c, in its file format without a version number.

found = read_llama2c("stories15M.bin")
found.decoder(tokens)                      # logits
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import DecoderConfig
from .decoder import Decoder

HEADER = ("width", "hidden", "layers", "heads", "kv_heads", "vocab", "context")  # 32-bit integers
#: the decoder's tensors of each layer, in the order of the file
BY_LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Llama2C:
    """A model of llama2.c.

    Args:
        decoder: the model.
        context: its training context.
        cos: the file's table of cosines, (context, D / 2), for interleaved planes.
        sin: the file's table of sines.
        pieces: bytes and score of each token, if the file contains the tokenizer.
    """

    decoder: Decoder
    context: int
    cos: Tensor
    sin: Tensor
    pieces: list[tuple[bytes, float]]


class _Reader:
    """Reads the tensors of a file, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes, self.place = path, path.read_bytes(), 4 * len(HEADER)

    def header(self) -> dict[str, int]:
        if len(self.bytes) < self.place:
            raise ValueError(f"{self.path} is not a llama2.c model: it has {len(self.bytes)} bytes")
        return dict(zip(HEADER, struct.unpack(f"<{len(HEADER)}i", self.bytes[: self.place]), strict=True))

    def take(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if len(self.bytes) < self.place + 4 * count:
            raise ValueError(
                f"{self.path} is not a llama2.c model, or is truncated: it ends within the weights"
            )
        part = bytearray(self.bytes[self.place : self.place + 4 * count])
        self.place += 4 * count
        return torch.frombuffer(part, dtype=torch.float32).view(shape)


def read_llama2c(path: str | os.PathLike[str]) -> Llama2C:
    """Read a model of llama2.c. Data after the weights is read as its tokenizer."""
    reader = _Reader(Path(path))
    sizes = reader.header()
    if (
        min(sizes[n] for n in HEADER if n != "vocab") < 1
        or sizes["width"] % sizes["heads"]
        or not sizes["vocab"]
    ):
        raise ValueError(f"{path} is not a llama2.c model without a version number: its header says {sizes}")
    config = _config(sizes)
    state, (cos, sin) = _weights(reader, config, sizes["context"])
    decoder = Decoder(config)
    decoder.load_state_dict(state, strict=False)  # the file has no frequencies
    return Llama2C(decoder.eval(), sizes["context"], cos, sin, _pieces(reader, config.vocab_size))


def _config(sizes: dict[str, int]) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=abs(sizes["vocab"]),
        width=sizes["width"],
        layers=sizes["layers"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        hidden=sizes["hidden"],
        encoding="rope",
        encoding_options={"layout": "interleaved"},
        qk_norm=False,
        tied=sizes["vocab"] > 0,  # negative if the head has its own matrix
    )


def _weights(reader: _Reader, config: DecoderConfig, context: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    c, keys = config.width, config.kv_heads * config.head_dim
    shapes = (
        (c,),
        (c, c),
        (keys, c),
        (keys, c),
        (c, c),
        (c,),
        (config.hidden, c),
        (c, config.hidden),
        (config.hidden, c),
    )
    state = {"model.embed_tokens.weight": reader.take(config.vocab_size, c)}
    for name, shape in zip(BY_LAYER, shapes, strict=True):
        stacked = reader.take(config.layers, *shape)
        state |= {f"model.layers.{i}.{name}.weight": each for i, each in enumerate(stacked)}
    state["model.norm.weight"] = reader.take(c)
    tables = [reader.take(context, config.head_dim // 2) for _ in range(2)]
    if not config.tied:
        state["lm_head.weight"] = reader.take(config.vocab_size, c)
    return state, tables


def _pieces(reader: _Reader, count: int) -> list[tuple[bytes, float]]:
    """Read llama2.c's tokenizer: the largest length, then score, length and bytes of each token."""
    rest = reader.bytes[reader.place :]
    found: list[tuple[bytes, float]] = []
    place = 4
    while rest and len(found) < count:
        score, size = struct.unpack_from("<fi", rest, place) if place + 8 <= len(rest) else (0.0, len(rest))
        if place + 8 + size > len(rest):
            raise ValueError(f"{reader.path}: the tokenizer after the weights is truncated")
        found.append((rest[place + 8 : place + 8 + size], score))
        place += 8 + size
    return found
