"""`grape train` and `grape recipes`."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..extras import require
from .errors import OK, CommandError
from .parsers import Commands, add_command, add_json

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
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe or a YAML file")
    _add_shortcuts(parser)
    add_settings(parser)
    parser.add_argument("--out", metavar="DIR", help="directory of the run (required to train)")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out; without a checkpoint, start fresh"
    )
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML, then exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="print model size, cost and schedule, then exit"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="with --dry-run: number of processes"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    add_json(parser)
    listing = add_command(commands, "recipes", run_recipes, "list the recipes", "grape recipes --json")
    listing.add_argument(
        "--rows", action="store_true", help="the runs of the paper's tables, with their cost"
    )
    add_json(listing)


def add_settings(parser: argparse.ArgumentParser, prefixes: Sequence[str] = ("",)) -> None:
    """Every setting as an option of its dotted name, kept out of the help, which would fill pages."""
    parser.set_defaults(unknown_settings=[])
    try:
        from ..lab.config import field_names
    except ImportError:  # reported when the command runs
        return
    names = [f"{prefix}{name}" for prefix in prefixes for name in field_names()]
    for name in names:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(unknown_settings=names)


def _add_shortcuts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--encoding", dest="model.encoding", default=argparse.SUPPRESS, metavar="NAME",
                        help="any encoding, or several joined by +")  # fmt: skip
    parser.add_argument("--kv-shift", dest="model.kv_shift", action="store_true", default=argparse.SUPPRESS,
                        help="mix each key and value with the previous one")  # fmt: skip


def refuse_unknown(options: argparse.Namespace, left: list[str]) -> None:
    """Name the nearest setting to one that does not exist."""
    known = getattr(options, "unknown_settings", None)
    if known == []:  # the library that declares them is missing
        _require_configuration()
    wrong = left[0].split("=")[0].lstrip("-")
    near = difflib.get_close_matches(wrong, known or [], n=1)
    hint = f"; did you mean --{near[0]}?" if near else "; --help lists the options"
    kind = "unknown option" if left[0].startswith("-") else "unexpected argument"
    raise CommandError(f"{kind} {left[0].split('=')[0]!r}{hint}")


def configured(options: argparse.Namespace) -> RunConfig:
    """The recipe with the options over it."""
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
        raise CommandError("give the run's directory with --out, such as --out runs/first")
    from ..lab.train.trainer import train

    outcome = train(config, options.out, resume=options.resume, quiet=options.quiet or options.json)
    return report(outcome, options.json)


def report(outcome: Any, as_json: bool) -> int:
    """Say how a run ended; a signal's number plus 128 is the exit code, as shells have it."""
    import os

    if int(os.environ.get("RANK", "0")) == 0:
        if as_json:
            print(json.dumps({**asdict(outcome), "directory": str(outcome.directory)}))
        elif outcome.signal:
            print(f"stopped and saved at step {outcome.step}; continue with --resume")
        else:
            loss = (
                "" if outcome.validation_loss is None else f", validation loss {outcome.validation_loss:.4f}"
            )
            print(f"{outcome.step} steps{loss}; the model is in {outcome.directory / 'final'}")
    return 128 + outcome.signal if outcome.signal else OK


def _dry_run(config: RunConfig, options: argparse.Namespace) -> int:
    import os

    from ..lab.train.describe import describe
    from ..lab.train.distributed import check_split
    from ..lab.train.estimate import estimate
    from ..lab.train.feed import vocabulary

    ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    check_split(config, ranks)
    size = vocabulary(config)
    print(
        json.dumps(asdict(estimate(config, size, ranks))) if options.json else describe(config, size, ranks)
    )
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
    print(
        f"{'recipe':<14}{'layers':>7}{'width':>7}{'heads':>7}{'sequence':>10}{'batch':>7}{'steps':>8}  data"
    )
    for name, c in recipes.items():
        print(
            f"{name:<14}{c.model.layers:>7}{c.model.width:>7}{c.model.heads:>7}{c.data.sequence:>10}"
            f"{c.train.batch:>7}{c.train.steps:>8}  {c.data.source}"
        )
    return OK
