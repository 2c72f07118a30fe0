"""`Decoder`, a language model in plain PyTorch, with its configuration, files and loss."""

from .config import DecoderConfig
from .decoder import Decoder, DecoderCache
from .decoder_files import load_decoder, save_decoder
from .loss import cross_entropy

__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "cross_entropy",
    "load_decoder",
    "save_decoder",
]
