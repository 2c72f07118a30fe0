"""`Attention`, a layer with any encoding, and the two modules it may hold: `KVShift`, `RMSNorm`."""

from .attention import Attention
from .kv_shift import KVShift
from .norm import RMSNorm

__all__ = ["Attention", "KVShift", "RMSNorm"]
