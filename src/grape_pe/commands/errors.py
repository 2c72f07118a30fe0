"""How a command ends."""

#: exit codes, as the docs list them
OK, CHECK_FAILED, BAD_INPUT, DIVERGED = 0, 1, 2, 3


class CommandError(Exception):
    """Something the user can put right: shown as one line, never as a traceback."""
