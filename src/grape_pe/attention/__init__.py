"""How attention with a bias is computed. `attend` is the one door; the rest are its rooms."""

from .api import attend

__all__ = ["attend"]
