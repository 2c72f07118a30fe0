"""Attention over sequences that are split over several devices."""

from .context import ContextParallel

__all__ = ["ContextParallel"]
