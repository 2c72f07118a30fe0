"""Attention with a bias: `attend`, and its implementations."""

from .attend import Explanation, attend
from .pruning import PruningReport, key_bound, record_pruning

__all__ = ["Explanation", "PruningReport", "attend", "key_bound", "record_pruning"]
