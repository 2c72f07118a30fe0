"""Exit codes and errors of the commands."""

#: exit codes, as the docs list them
OK, CHECK_FAILED, BAD_INPUT, DIVERGED = 0, 1, 2, 3


class CommandError(Exception):
    """Usage error, printed as one line without a traceback."""
