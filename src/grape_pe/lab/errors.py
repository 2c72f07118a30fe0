"""Errors of the lab that the user can fix."""


class LabError(ValueError):
    """Usage error: the command line prints the message, which says what to change, and no traceback."""


class Diverged(LabError):
    """Training stopped: the loss or a gradient is NaN or Inf, or rose after all rollbacks."""
