"""Errors of the lab that the user can fix."""


class LabError(ValueError):
    """Usage error: the command line prints the message, which says what to change, and no traceback."""


class Diverged(LabError):
    """The loss or a gradient is NaN or Inf: training stopped, that step was not applied."""
