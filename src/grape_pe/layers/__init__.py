"""`Attention`, an attention layer with any encoding, and the modules it uses: `KVShift` and `RMSNorm`."""

from .attention import Attention
from .kv_shift import KVShift
from .norm import RMSNorm

__all__ = ["Attention", "KVShift", "RMSNorm"]
