"""Encodings: what a token does to its query and key on arrival. One file a family.

`rotary` RoPE and GRAPE-M · `additive` ALiBi, FoX and GRAPE-A · `path_integral` GRAPE-AP ·
`liere`, `path` baselines · `registry` their names.
"""

from .base import Composite, Encoded, Encoding, HeadShape, Tokens
from .registry import build, names, register
from .rotary import convert_layout

__all__ = [
    "Composite",
    "Encoded",
    "Encoding",
    "HeadShape",
    "Tokens",
    "build",
    "convert_layout",
    "names",
    "register",
]
