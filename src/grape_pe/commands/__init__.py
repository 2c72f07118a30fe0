"""The subcommands of `grape`, a module each. What they need is imported when they run."""

from . import bench, compare, completion, data, doctor, evaluate, inspect, model, report, sample, train

#: in the order of the help
COMMANDS = (compare, report, inspect, train, sample, data, evaluate, model, bench, doctor, completion)
