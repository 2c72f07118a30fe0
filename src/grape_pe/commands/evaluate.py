"""`grape eval`."""

from __future__ import annotations

import argparse
import json

from .errors import OK
from .parsers import Commands, add_command, add_json


def add_parsers(commands: Commands) -> None:
    group = add_command(commands, "eval", None, "score a model", "grape eval lm runs/x/final --limit 100")
    kinds = group.add_subparsers(title="evaluations", metavar="WHAT", required=True)
    parser = add_command(
        kinds, "lm", run_lm, "accuracy on language tasks, by lm_eval",
        "grape eval lm runs/x/final --tasks arc_easy,sciq --limit 100",
    )  # fmt: skip
    parser.add_argument("checkpoint", help="a model's directory or Hub name")
    parser.add_argument("--tasks", help="separated by commas (default: the paper's seven)")
    parser.add_argument("--include", help="a directory of local task files")
    parser.add_argument("--tokenizer", help="if the checkpoint has none, another directory or Hub name")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--limit", type=int, help="at most so many samples of each task")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", help="write the scores to this JSON file")
    add_json(parser)


def run_lm(options: argparse.Namespace) -> int:
    from ..lab.evaluate.benchmarks import PAPER_TASKS, evaluate, load_checkpoint

    model, tokenizer = load_checkpoint(options.checkpoint, options.tokenizer)
    scores = evaluate(
        model,
        tokenizer,
        list(PAPER_TASKS) if options.tasks is None else [name for name in options.tasks.split(",") if name],
        include=options.include,
        shots=options.shots,
        limit=options.limit,
        batch_size=options.batch_size,
        checkpoint=options.checkpoint,
    )
    print(json.dumps(scores.to_dict()) if options.json else scores.table())
    if options.output:
        scores.save(options.output)
    return OK
