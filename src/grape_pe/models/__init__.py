"""Models built on encodings.

`decoder` the language model in plain PyTorch, of `blocks`, `layout`, `layer_cache`, `loss` and `kv_shift` ·
`hf` the same as a Hugging Face model · `adapter` moves pretrained models in · `exporter` moves them out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import DecoderConfig
from .decoder import Decoder, DecoderCache
from .decoder_files import load_decoder, save_decoder
from .kv_shift import KVShift
from .loss import cross_entropy

if TYPE_CHECKING:
    from .adapter import adapt, new_parameters
    from .adapter_files import load_adapted, load_adapter, save_adapted, save_adapter
    from .exporter import export
    from .hf import GrapeConfig, GrapeForCausalLM, GrapeModel

#: imported on first use, because they need transformers
_LAZY = {
    "GrapeConfig": "hf",
    "GrapeForCausalLM": "hf",
    "GrapeModel": "hf",
    "adapt": "adapter",
    "export": "exporter",
    "new_parameters": "adapter",
    "load_adapted": "adapter_files",
    "load_adapter": "adapter_files",
    "save_adapted": "adapter_files",
    "save_adapter": "adapter_files",
}

__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "GrapeConfig",
    "GrapeForCausalLM",
    "GrapeModel",
    "KVShift",
    "adapt",
    "cross_entropy",
    "export",
    "load_adapted",
    "load_adapter",
    "load_decoder",
    "new_parameters",
    "save_adapted",
    "save_adapter",
    "save_decoder",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f".{_LAZY[name]}", __name__))[name]
