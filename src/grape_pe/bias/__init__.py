"""The additive logit b(t, j), from tensors of the query and of the key: a closed set of frozen dataclasses.

Letters: B batch, H query heads, T tokens (Tq queries, Tk keys), P probe features. Every kind

- makes any tile b[rows, cols] (`tile`), which is all the reference attention needs;
- can be cut along queries (`queries`) and keys (`keys`), and continued along keys (`extend`),
  which is all a cache needs;
- adds to any other (`+`).

When Tq < Tk the last query stands at the last key, so query row r is the token r + Tk - Tq.
A bias is never scaled by 1/sqrt(D), and non-positive wherever rates are non-negative and j <= t. The
exception is a `TileBias` of products that stand in place of <q, k> (PaTH), or that reads them (`ProductBias`): it has a
`scale`, which `attend` sets to its own through `at_scale`.
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
