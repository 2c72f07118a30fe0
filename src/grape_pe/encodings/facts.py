"""Descriptions of encodings, as `grape encodings`, the atlas and the README show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """The description of an encoding. `Encoding.facts` has one for each registered name.

    Args:
        name: the registered name.
        about: what it does to q and k, or to the score, in one line.
        formula: plain text, with `_x` and `^x` for sub- and superscripts, and braces around several letters.
        group: the group element of a token, or why there is none.
        source: the paper, and models that use it.
        recovers: published encodings that are special cases of it.
        learned: its learned parameters; empty if there are none.
        law_with: options for which the relative law holds, if it does not hold for the defaults.
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
