"""`grape train` and `grape recipes`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..extras import require
from ..lab.columns import aligned
from .errors import OK, CommandError
from .parsers import Commands, Parser, add_command, positive

if TYPE_CHECKING:
    from ..lab.config import RunConfig

EXAMPLE = "grape train small --encoding grape-ap --train.steps 500 --train.checkpoint_every 50 --out runs/x"


def add_parsers(commands: Commands) -> None:
    about = (
        "Train a model. RECIPE is a shipped one (grape recipes) or a YAML file; any of its settings can be\n"
        "given as --section.name VALUE (--print-config shows them all). It also runs under torchrun.\n"
        "Ctrl-C and SIGTERM save a checkpoint first; run the same command with --resume to continue."
    )
    parser = add_command(commands, "train", run_train, "train a model", EXAMPLE, about)
    add = parser.option
    add("recipe", "RECIPE", "a shipped recipe or a YAML file")
    add(
        "--encoding", "NAME", "any encoding, or several joined by +", argparse.SUPPRESS, dest="model.encoding"
    )
    parser.flag("--kv-shift", dest="model.kv_shift", default=argparse.SUPPRESS)
    add_settings(parser)
    add("--out", "DIR", "directory of the run (required to train)")
    parser.flag("--resume", "continue the run in --out; without a checkpoint, start fresh")
    parser.flag("--print-config", "print the settings as YAML, then exit")
    parser.flag("--dry-run", "print model size, cost and schedule, then exit")
    add("--ranks", "N", "with --dry-run: number of processes", type=positive)
    parser.flag("--quiet")
    parser.flag("--json")
    listing = add_command(commands, "recipes", run_recipes, "list the recipes", "grape recipes --json")
    listing.flag("--rows", "the runs of the paper's tables, with their cost")
    listing.flag("--json")


def add_settings(parser: Parser, prefixes: Sequence[str] = ("",)) -> None:
    """Every setting as an option with its dotted name, hidden from the help."""
    parser.set_defaults(unknown_settings=[])
    try:
        from ..lab.config import field_names
    except ImportError:  # reported when the command runs
        return
    names = [f"{prefix}{name}" for prefix in prefixes for name in field_names()]
    for name in names:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(unknown_settings=names)


def refuse_unknown(options: argparse.Namespace, left: list[str]) -> None:
    """Raise an error about an unknown option, with the nearest one as a hint."""
    known = getattr(options, "unknown_settings", None)
    if known == []:  # the library that declares them is missing
        _require_configuration()
    wrong = left[0].split("=")[0].lstrip("-")
    near = difflib.get_close_matches(wrong, known or [], n=1)
    hint = f"; did you mean --{near[0]}?" if near else "; --help lists the options"
    kind = "unknown option" if left[0].startswith("-") else "unexpected argument"
    raise CommandError(f"{kind} {left[0].split('=')[0]!r}{hint}")


def configured(options: argparse.Namespace) -> RunConfig:
    """The recipe with the options applied."""
    _require_configuration()
    from ..lab.config import field_names, load

    given = vars(options)
    return load(options.recipe, {name: given[name] for name in field_names() if name in given})


def run_train(options: argparse.Namespace) -> int:
    config = configured(options)
    if options.print_config:
        print(json.dumps(config.model_dump(), indent=2) if options.json else config.to_yaml(), end="")
        return OK
    if options.dry_run:
        return _dry_run(config, options)
    if not options.out:
        raise CommandError("--out is required to train: give the run's directory, such as --out runs/first")
    from ..lab.train.trainer import train

    outcome = train(config, options.out, resume=options.resume, quiet=options.quiet or options.json)
    return report(outcome, options.json)


def report(outcome: Any, as_json: bool) -> int:
    """Print the result of a run; returns the exit code, 128 + the signal that stopped it."""
    if os.environ.get("RANK", "0") != "0":
        pass
    elif as_json:
        print(json.dumps({**asdict(outcome), "directory": str(outcome.directory)}))
    elif outcome.signal:
        print(f"stopped and saved at step {outcome.step}; continue with --resume")
    else:
        loss = outcome.validation_loss
        shown = "" if loss is None else f", validation loss {loss:.4f}"
        print(f"{outcome.step} steps{shown}; the model is in {outcome.directory / 'final'}")
    return 128 + outcome.signal if outcome.signal else OK


def _dry_run(config: RunConfig, options: argparse.Namespace) -> int:
    from ..lab.train.describe import describe
    from ..lab.train.distributed import check_split
    from ..lab.train.estimate import estimate
    from ..lab.train.feed import vocabulary

    ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    check_split(config, ranks)
    size = vocabulary(config)
    found = (
        json.dumps(asdict(estimate(config, size, ranks))) if options.json else describe(config, size, ranks)
    )
    print(found)
    return OK


def _require_configuration() -> None:
    for module in ("pydantic", "yaml"):
        require(module, "lab")


def run_recipes(options: argparse.Namespace) -> int:
    _require_configuration()
    from ..lab.config import load, recipe_names

    if options.rows:
        from ..lab.paper import rows
        from ..lab.train.describe import PAPER_GPUS, describe_rows

        found = {row.name: row.arguments for row in rows()}
        print(json.dumps(found) if options.json else describe_rows(PAPER_GPUS))
        return OK
    recipes = {name: load(name) for name in recipe_names()}
    if options.json:
        print(json.dumps({name: config.model_dump() for name, config in recipes.items()}, indent=2))
        return OK
    table = [["recipe", "layers", "width", "heads", "sequence", "batch", "steps", "data"]]
    for name, c in recipes.items():
        sizes = (c.model.layers, c.model.width, c.model.heads, c.data.sequence, c.train.batch, c.train.steps)
        table.append([name, *map(str, sizes), c.data.source])
    print(aligned(table, left=1))
    return OK
