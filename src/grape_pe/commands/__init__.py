"""The subcommands of `grape`, a module each. What they need is imported when they run."""

from . import (
    adapt,
    atlas,
    bench,
    compare,
    completion,
    data,
    doctor,
    encodings,
    evaluate,
    inspect,
    model,
    report,
    sample,
    train,
)

#: in the order of the help
COMMANDS = (
    encodings, atlas, compare, report, inspect, train, adapt, sample, data, evaluate, model, bench, doctor, completion,
)  # fmt: skip
