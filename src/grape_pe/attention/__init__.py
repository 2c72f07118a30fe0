"""How attention with a bias is computed. `attend` is the one door; the rest are its rooms."""

from .api import Explanation, attend
from .pruning import PruningReport, record_pruning

__all__ = ["Explanation", "PruningReport", "attend", "record_pruning"]
