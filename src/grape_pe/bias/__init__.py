"""Additive logits b(t, j) of a query t and a key j, as frozen dataclasses of query-side and key-side tensors.

Letters: B batch, H query heads, T tokens (Tq queries, Tk keys), P probe features. Every kind of bias

- computes any tile b[rows, cols] (`tile`), which the reference attention uses;
- can be sliced along queries (`queries`) and keys (`keys`) and extended by later keys (`extend`), which the
  cache uses;
- can be added to any other (`+`).

When Tq < Tk the last query is aligned with the last key: query row r is token r + Tk - Tq.
A bias is not multiplied by the scale of <q, k>, with one exception: a `TileBias` that replaces <q, k> (PaTH) or reads
it (`ProductBias`) has a `scale`, which `attend` sets to its own through `at_scale`.
"""

from .base import NO_BIAS, Bias, LogitFunction, NoBias
from .distance import Beyond, DistanceBias
from .features import ProductBias, ScoreBias, ScoreFunction, TileBias
from .path import LINKS, Link, PathBias, ProbeRotation
from .slope import SlopeBias, SlopeTerm, terms_of
from .sum import SumBias, parts_of

__all__ = [
    "LINKS",
    "NO_BIAS",
    "Beyond",
    "Bias",
    "DistanceBias",
    "Link",
    "LogitFunction",
    "NoBias",
    "PathBias",
    "ProbeRotation",
    "ProductBias",
    "ScoreBias",
    "ScoreFunction",
    "SlopeBias",
    "SlopeTerm",
    "SumBias",
    "TileBias",
    "parts_of",
    "terms_of",
]
