"""What the lab says when a user can put it right."""


class LabError(ValueError):
    """Shown as one line by the command line, never as a traceback."""


class Diverged(LabError):
    """A loss or gradient that is no finite number: the run stopped."""
