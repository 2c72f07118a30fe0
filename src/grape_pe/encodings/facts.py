"""What is known about an encoding: the text that `grape encodings`, the atlas and the README show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """One encoding in words. The attribute `facts` of a class has one for each name it is registered under.

    Args:
        name: the registered name.
        about: what it does to q and k, or to the score; one line.
        formula: as plain text. `_x` and `^x` are read as sub- and superscripts, with braces for several letters.
        group: the group element of a token, or why there is none.
        source: the paper, and models that use it.
        recovers: published encodings that it contains.
        learned: what is learned; empty for nothing.
        law_with: options with which it keeps the relative law, where its defaults do not.
    """

    name: str
    about: str
    formula: str
    group: str
    source: str
    recovers: str = ""
    learned: str = ""
    law_with: Mapping[str, Any] = field(default_factory=dict)


#: the paper of the GRAPE family
GRAPE = "Zhang et al., 2025, Group Representational Position Encoding, arXiv:2512.07805"
