"""Errors of the lab that the user can fix."""


class LabError(ValueError):
    """Usage error, printed by the command line as one line without a traceback."""


class Diverged(LabError):
    """Training stopped: the loss or a gradient is not finite, or the loss rose after all rollbacks."""
