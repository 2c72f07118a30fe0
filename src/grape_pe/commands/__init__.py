"""The subcommands of `grape`, a module each. What they need is imported when they run."""

from . import bench, compare, completion, data, evaluate, model, sample, train

#: in the order of the help
COMMANDS = (compare, train, sample, data, evaluate, model, bench, completion)
