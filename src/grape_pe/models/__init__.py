"""The language model in plain PyTorch: `Decoder`, of `blocks`, `layout`, `loss` and `kv_shift`."""

from .config import DecoderConfig
from .decoder import Decoder, DecoderCache
from .decoder_files import load_decoder, save_decoder
from .kv_shift import KVShift
from .loss import cross_entropy

__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "KVShift",
    "cross_entropy",
    "load_decoder",
    "save_decoder",
]
