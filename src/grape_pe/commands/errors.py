"""How a command ends."""

#: exit codes, as the docs list them
OK, BAD_INPUT, DIVERGED = 0, 2, 3


class CommandError(Exception):
    """Something the user can put right: shown as one line, never as a traceback."""
