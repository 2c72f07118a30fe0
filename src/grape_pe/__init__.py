"""Position encodings as group actions: one object says what a token does on arrival.

import grape_pe as grape

enc = grape.build("grape-ap", heads=8, head_dim=64, width=512)
code = enc(q, k, x=x)
y = grape.attend(code.q, code.k, v, bias=code.bias)
"""

from typing import Any

from . import bias, encodings, groups
from .attention import attend, record_pruning
from .bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias, TileBias
from .cache import StreamingCache
from .encodings import Encoded, Encoding, HeadShape, Tokens, build, convert_layout, names, register

__version__ = "0.1.0"


def adapt(model: Any, encoding: str, **options: Any) -> Any:
    """Give a live pretrained Llama or Qwen model another encoding: see `grape_pe.hf.adapt`."""
    from .hf import adapt as move_in  # here, because it imports transformers

    return move_in(model, encoding, **options)


__all__ = [
    "Bias",
    "Encoded",
    "Encoding",
    "HeadShape",
    "NoBias",
    "PathBias",
    "SlopeBias",
    "SlopeTerm",
    "StreamingCache",
    "SumBias",
    "TileBias",
    "Tokens",
    "adapt",
    "attend",
    "bias",
    "build",
    "convert_layout",
    "encodings",
    "groups",
    "names",
    "record_pruning",
    "register",
]
