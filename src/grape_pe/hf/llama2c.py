"""Convert a llama2.c model and its tokenizer to a Hugging Face Llama directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from ..models.llama2c import read_llama2c
from .exporter import to_stock

SPACE = "▁"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def convert_llama2c(file: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Convert a llama2.c file to a directory for `AutoModelForCausalLM`, with the tokenizer if the file has one."""
    found, directory = read_llama2c(file), Path(directory)
    stock: Any = to_stock(found.decoder)
    stock.config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}  # the same frequencies
    stock.config.max_position_embeddings = found.context
    stock.config.bos_token_id, stock.config.eos_token_id = 1, 2
    stock.generation_config.bos_token_id, stock.generation_config.eos_token_id = 1, 2
    stock.save_pretrained(directory)
    if found.pieces:
        inner = sentencepiece_bpe(found.pieces)
        special = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
        PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(str(directory))
    return directory


def sentencepiece_bpe(pieces: Sequence[tuple[bytes, float]]) -> Tokenizer:
    """A byte-pair encoding like SentencePiece's: it first merges the pair whose union has the highest score."""
    names = [UNKNOWN, BEGIN, END, *(_name(piece, i) for i, (piece, _) in enumerate(pieces[3:], start=3))]
    vocabulary = {name: i for i, name in enumerate(names)}
    inner = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(names, vocabulary, pieces),
            unk_token=UNKNOWN,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([UNKNOWN, BEGIN, END])
    return inner


def _name(piece: bytes, number: int) -> str:
    """The token as SentencePiece writes it; numbers 3 to 258 are single bytes."""
    return f"<0x{number - 3:02X}>" if number < 259 else piece.decode().replace(" ", SPACE)


def _merges(
    names: Sequence[str], vocabulary: dict[str, int], pieces: Sequence[tuple[bytes, float]]
) -> list[tuple[str, str]]:
    found = []
    for name, (_, score) in zip(names[259:], pieces[259:], strict=True):
        halves = [(name[:i], name[i:]) for i in range(1, len(name))]
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        found += [
            (-score, *sorted([pair], key=lambda p: (vocabulary[p[0]], vocabulary[p[1]]))[0]) for pair in known
        ]
    ranked = sorted(found, key=lambda each: (each[0], vocabulary[each[1]], vocabulary[each[2]]))
    return [(left, right) for _, left, right in ranked]
