"""Comparing encodings: arms, seeds, learning rates and budgets, run side by side."""
