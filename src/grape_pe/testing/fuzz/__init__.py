"""Compare random cases with independent dense computations: `python -m grape_pe.testing.fuzz attend`.

Each target is a module with a function `check(seed: int) -> Outcome` that draws a case from the seed, computes it both
ways, and raises an AssertionError if the results differ. If the library raises a ValueError or TypeError for a case, it
is counted as refused; any other exception is a failure.
"""

from .runner import Outcome, Summary, run

__all__ = ["Outcome", "Summary", "run"]
