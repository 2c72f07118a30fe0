"""Position encodings: each rotates q and k, or adds a bias to the scores. One file per family.

`rotary` RoPE and GRAPE-M · `additive` ALiBi, FoX and GRAPE-A · `path_integral` GRAPE-AP · `temperature` log-n
attention · `registry` builds encodings by name · `facts` describes them · `own` finds encodings of users and of
other packages.
"""

from .base import Composite, Encoded, Encoding, HeadShape, Tokens
from .facts import Facts
from .registry import build, names, register
from .rotary import convert_layout

__all__ = [
    "Composite",
    "Encoded",
    "Encoding",
    "Facts",
    "HeadShape",
    "Tokens",
    "build",
    "convert_layout",
    "names",
    "register",
]
