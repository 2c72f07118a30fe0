"""KV caches: `StreamingCache`, its storage `TokenTable`, and the `Layout` of the tokens of a call."""

from .inputs import AttentionInputs, Norms, check_packing, encode
from .layout import Layout, Tail, arrange
from .stream import StreamingCache
from .table import TokenTable

__all__ = [
    "AttentionInputs",
    "Layout",
    "Norms",
    "StreamingCache",
    "Tail",
    "TokenTable",
    "arrange",
    "check_packing",
    "encode",
]
