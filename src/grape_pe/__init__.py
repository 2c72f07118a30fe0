"""Position encodings for attention (RoPE, ALiBi, FoX, GRAPE and others), fast attention and KV caches.

import grape_pe as grape

layer = grape.Attention(512, heads=8, encoding="grape-ap")      # a layer
y = layer(x)

enc = grape.build("grape-ap", heads=8, head_dim=64, width=512)  # an encoding, and attention with its bias
code = enc(q, k, x=x)
y = grape.attend(code.q, code.k, v, bias=code.bias)
"""

from typing import Any, TypeVar

from torch import nn

from . import bias, encodings, groups
from .attention import attend, record_pruning
from .bias import Bias, DistanceBias, NoBias, PathBias, ScoreBias, SlopeBias, SlopeTerm, SumBias, TileBias
from .cache import StreamingCache
from .encodings import Encoded, Encoding, Facts, HeadShape, Tokens, build, convert_layout, names, register
from .layers import Attention

__version__ = "0.2.0"


Model = TypeVar("Model", bound=nn.Module)


def adapt(model: Model, encoding: str, **options: Any) -> Model:
    """Replace the encoding of a pretrained transformers model, in place. Same as `grape_pe.hf.adapt`.

    Args:
        model: a stock model for causal language modeling, such as Llama or Qwen.
        encoding: the new encoding, such as "rope+fox".
        options: the other arguments of `grape_pe.hf.adapt`.

    Returns:
        The same model.
    """
    from . import hf  # not at the top, because it imports transformers

    adapted: Any = hf.adapt
    return adapted(model, encoding, **options)  # type: ignore[no-any-return]


__all__ = [
    "Attention",
    "Bias",
    "DistanceBias",
    "Encoded",
    "Encoding",
    "Facts",
    "HeadShape",
    "NoBias",
    "PathBias",
    "ScoreBias",
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
