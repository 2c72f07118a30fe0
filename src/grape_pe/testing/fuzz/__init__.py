"""Random cases against independent dense computations: `python -m grape_pe.testing.fuzz attend`.

Each target is a module with a function `check(seed: int) -> Outcome` that draws one case from the seed,
computes it both ways, and raises `AssertionError` on a mismatch. A case the library refuses with a
`ValueError` or `TypeError` is counted, any other exception is a failure.
"""

from .runner import Outcome, Summary, run

__all__ = ["Outcome", "Summary", "run"]
