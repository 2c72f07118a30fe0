"""`grape adapt`."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from ..extras import require
from .errors import OK, CommandError
from .parsers import Commands, add_command, add_json

EXAMPLE = (
    "grape adapt llama/ --encoding rope+grape-ap --data books/ --context 2048 --steps 500 --out adapted\n"
    "  grape adapt model.gguf --sweep rope,rope+fox,rope+grape-ap --lora 16 --data books/ --out sweep"
)
DEFAULTS = {"steps": 500, "batch": 4, "micro_batch": 1, "eval_tokens": 1 << 14, "checkpoint_every": 50}


def add_parsers(commands: Commands) -> None:
    about = (
        "Give MODEL (a Hugging Face directory or a GGUF file) another encoding, train it, and measure it before, "
        "during and after. Until it is trained its logits are unchanged. To continue after a stop, run the same "
        "command again."
    )
    parser = add_command(commands, "adapt", run_adapt, "adapt a pretrained model", EXAMPLE, about)
    parser.usage = "grape adapt MODEL --encoding NAME --data FILE [FILE ...] --out DIR [options]"
    add = parser.add_argument
    add("model", metavar="MODEL", help=argparse.SUPPRESS)
    add("--encoding", metavar="NAME", help="such as rope+fox or 'rope+fox[forget_bias=4]'")
    add("--sweep", metavar="NAMES", help="several encodings, separated by commas")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text, JSONL or Parquet files, directories or globs",
    )
    add("--out", required=True, metavar="DIR", help="results; load DIR/final after import grape_pe.hf")
    _add_training(parser)
    _add_evaluation(parser)
    add("--quiet", action="store_true", help="no progress line")
    add_json(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--train", choices=("new", "all"), default="new", help="train the new parameters (default) or all")
    add("--lora", type=int, default=0, metavar="RANK", help="also train LoRA of this rank on the model")
    add(
        "--context",
        type=int,
        default=0,
        metavar="N",
        help="tokens per sequence (default: the model's)",
    )
    add("--steps", type=int, default=DEFAULTS["steps"], metavar="N", help="training steps (default: 500)")
    add("--batch", type=int, default=DEFAULTS["batch"], metavar="N", help="sequences per step (default: 4)")
    add("--micro-batch", type=int, default=DEFAULTS["micro_batch"], metavar="N",
        help="sequences per forward pass (default: 1)")  # fmt: skip
    add("--lr", type=float, metavar="RATE", help="learning rate of new parameters (default: 1e-3)")
    add(
        "--own-lr",
        type=float,
        metavar="RATE",
        help="that of LoRA (default: 5e-4) or the model (1e-4)",
    )
    add("--shared", action="store_true", help="one encoding for all layers")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add("--bf16", action="store_true", help="autocast to bfloat16; weights stay float32")
    add("--recompute", action="store_true", help="checkpoint activations: less memory, more time")
    add("--checkpoint-every", type=int, default=DEFAULTS["checkpoint_every"], metavar="N",
        help="steps between checkpoints (default: 50)")  # fmt: skip


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--lengths",
        default="1,2,4,8,16",
        metavar="N,N",
        help="multiples of the context (default: 1,2,4,8,16)",
    )
    add("--eval-tokens", type=int, default=DEFAULTS["eval_tokens"], metavar="N",
        help="tokens evaluated per length (default: 16384)")  # fmt: skip
    add(
        "--eval-every",
        type=int,
        default=0,
        metavar="N",
        help="steps (default: a quarter of --steps)",
    )
    add("--tasks", metavar="NAMES", help="language tasks to score, separated by commas")
    add(
        "--task-data",
        default="",
        metavar="DIR",
        help="questions of --tasks, as for grape eval lm --data",
    )
    add("--task-limit", type=int, default=0, metavar="N", help="questions per task (default: all)")
    add("--passkey", type=int, default=0, metavar="N",
        help="passkey texts per length and depth (default: none)")  # fmt: skip
    add("--export", action="store_true", help="also write DIR/stock, without grape_pe")


def run_adapt(options: argparse.Namespace) -> int:
    require("pydantic", "lab")
    require("transformers", "hf")
    from ..lab.adapt.run import adapt_model
    from ..lab.written import split_names

    if (options.encoding is None) == (options.sweep is None):
        raise CommandError("give either --encoding NAME or --sweep NAME,NAME,…")
    encodings = [options.encoding] if options.sweep is None else split_names(options.sweep)
    found = adapt_model(
        options.model, encodings, options.data, options.out, wishes(options), options.quiet or options.json
    )
    if found.signal:
        print("stopped and saved; run the same command to continue")
        return 128 + found.signal
    models = {label: str(path) for label, path in found.models.items()}
    if options.json:
        print(json.dumps({"report": str(found.report), "models": models}))
        return OK
    for label, path in models.items():
        print(f"{label}: {path}")
    print(f"Report: {found.report}")
    return OK


def wishes(options: argparse.Namespace) -> Any:
    """The options as the lab takes them."""
    from ..lab.adapt.settings import NEW_RATE, Wishes

    if options.lora and options.train == "all":
        raise CommandError("--lora trains LoRA beside the new parameters; leave --train all out, or --lora")
    for name in ("context", "lora", "eval_every", "checkpoint_every", "task_limit", "passkey", "seed"):
        if getattr(options, name) < 0:
            raise CommandError(
                f"--{name.replace('_', '-')} must not be negative, got {getattr(options, name)}"
            )
    given = {name: value for name, value in vars(options).items() if name in {f.name for f in fields(Wishes)}}
    return Wishes(
        **given
        | {
            "method": "lora" if options.lora else options.train,
            "lr": NEW_RATE if options.lr is None else options.lr,
            "factors": _numbers(options.lengths),
            "tasks": [name for name in (options.tasks or "").split(",") if name],
        }
    )


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise CommandError(f"--lengths takes whole numbers from 1 on, separated by commas, got {text!r}")
    return found
