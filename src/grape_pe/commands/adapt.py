"""`grape adapt`."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from ..extras import require
from ..lab.adapt.wishes import Wishes
from .errors import OK, CommandError
from .parsers import Commands, Parser, add_command, names, natural, numbers, real

EXAMPLE = (
    "grape adapt llama/ --encoding rope+grape-ap --data books/ --context 2048 --steps 500 --out adapted\n"
    "  grape adapt model.gguf --sweep rope,rope+fox,rope+grape-ap --lora 16 --data books/ --out sweep"
)
ABOUT = (
    "Give MODEL (a Hugging Face directory or a GGUF file) another encoding, train it, and measure it before, "
    "during and after. Until it is trained its logits are unchanged. To continue after a stop, run the same "
    "command again."
)


def add_parsers(commands: Commands) -> None:
    parser = add_command(commands, "adapt", run_adapt, "adapt a pretrained model", EXAMPLE, ABOUT)
    parser.usage = "grape adapt MODEL --encoding NAME --data FILE [FILE ...] --out DIR [options]"
    parser.add_argument("model", metavar="MODEL", help=argparse.SUPPRESS)
    parser.option("--encoding", "NAME", "such as rope+fox or 'rope+fox[forget_bias=4]'")
    parser.option("--sweep", "NAMES", "several encodings, separated by commas", type=names)
    parser.option(
        "--data", "FILE", "text, JSONL or Parquet files, directories or globs", nargs="+", required=True
    )
    parser.option("--out", "DIR", "results; load DIR/final after import grape_pe.hf", required=True)
    _add_wishes(parser)
    parser.flag("--quiet")
    parser.flag("--json")


def _add_wishes(parser: Parser) -> None:
    kinds = {
        "int": natural,
        "float": real,
        "float | None": real,
        "Sequence[int]": numbers,
        "Sequence[str]": names,
    }
    for each in fields(Wishes):
        name, help = f"--{each.name.replace('_', '-')}", each.metadata["help"]
        if each.name == "train":
            parser.add_argument(name, choices=("new", "all"), default=each.default, help=help)
        elif each.type == "bool":
            parser.flag(name, help)
        else:
            kind = kinds.get(str(each.type), str)
            parser.option(name, each.metadata["metavar"], help, each.default, kind)


def run_adapt(options: argparse.Namespace) -> int:
    require("pydantic", "lab")
    require("transformers", "hf")
    from ..lab.adapt.run import adapt_model

    if (options.encoding is None) == (options.sweep is None):
        raise CommandError("give either --encoding NAME or --sweep NAME,NAME,…")
    wishes = Wishes(**{each.name: getattr(options, each.name) for each in fields(Wishes)})
    found = adapt_model(
        options.model, options.sweep or [options.encoding], options.data, options.out, wishes,
        options.quiet or options.json,
    )  # fmt: skip
    if found.signal:
        print("stopped and saved; run the same command to continue")
        return 128 + found.signal
    models = {label: str(path) for label, path in found.models.items()}
    if options.json:
        print(json.dumps({"report": str(found.report), "models": models}))
        return OK
    print("\n".join([*(f"{label}: {path}" for label, path in models.items()), f"Report: {found.report}"]))
    return OK
