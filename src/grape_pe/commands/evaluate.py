"""`grape eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .errors import OK, CommandError
from .parsers import Commands, add_command, add_json, natural, positive


def add_parsers(commands: Commands) -> None:
    group = add_command(commands, "eval", None, "score a model", "grape eval lm runs/x/final --limit 100")
    kinds = group.add_subparsers(title="evaluations", metavar="WHAT", required=True)
    parser = add_command(
        kinds, "lm", run_lm, "accuracy on language tasks, by lm_eval",
        "grape eval lm runs/x/final --tasks arc_easy,sciq --limit 100",
        "Accuracy on language tasks, by lm_eval. On 8 GPUs: torchrun --nproc_per_node=8 -m grape_pe.cli eval lm …",
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a model's directory or Hub name")
    parser.add_argument("--tasks", metavar="NAMES", help="separated by commas (default: the paper's seven)")
    parser.add_argument("--include", metavar="DIR", help="a directory of local task files")
    parser.add_argument(
        "--data", metavar="DIR", help="a directory with the questions of the paper's tasks, TASK.jsonl each"
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="directory or Hub name of the tokenizer (default: the model's)"
    )
    parser.add_argument(
        "--shots", type=natural, default=0, metavar="N", help="few-shot examples (default: 0)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="most questions per task")
    parser.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="questions per batch (default: 8)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the scores to this JSON file")
    add_json(parser)
    _add_passkey(kinds)


def _add_passkey(kinds: Commands) -> None:
    parser = add_command(
        kinds, "passkey", run_passkey, "find a number in a long text, by length and depth",
        "grape eval passkey adapted/final --lengths 1024,4096",
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a model's directory, GGUF file or Hub name")
    parser.add_argument(
        "--lengths",
        default="256,512,1024,2048,4096",
        metavar="N,N",
        help="text lengths in tokens (default: 256,512,1024,2048,4096)",
    )
    parser.add_argument(
        "--cases", type=positive, default=4, metavar="N", help="texts for each length and depth (default: 4)"
    )
    parser.add_argument(
        "--others", type=natural, default=0, metavar="N", help="distractor numbers in each text (default: 0)"
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="directory or Hub name of the tokenizer (default: the model's)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the scores to this JSON file")
    add_json(parser)


def run_passkey(options: argparse.Namespace) -> int:
    from ..lab.evaluate.benchmarks import load_checkpoint
    from ..lab.evaluate.passkey import passkey_scores, passkey_table, to_json
    from ..lab.files import write_json

    lengths = _lengths(options.lengths)
    model, tokenizer = load_checkpoint(options.checkpoint, options.tokenizer)
    found = passkey_scores(model, tokenizer, lengths, cases=options.cases, others=options.others)
    print(json.dumps(to_json(found)) if options.json else passkey_table(found))
    if options.output:
        write_json(Path(options.output), to_json(found))
    return OK


def _lengths(text: str) -> list[int]:
    parts = [part for part in text.split(",") if part]
    if not parts or not all(part.isdecimal() for part in parts):
        raise CommandError(f"--lengths takes whole numbers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def run_lm(options: argparse.Namespace) -> int:
    from ..lab.evaluate.benchmarks import PAPER_TASKS, check_tasks, evaluate, load_checkpoint
    from ..lab.train.distributed import world

    tasks = (
        list(PAPER_TASKS) if options.tasks is None else [name for name in options.tasks.split(",") if name]
    )
    if options.data is not None:
        check_tasks(tasks, options.include, options.data)
    with world(Path(options.output or ".").parent) as among:
        model, tokenizer = load_checkpoint(options.checkpoint, options.tokenizer)
        scores = evaluate(
            model, tokenizer, tasks,
            include=options.include, data=options.data, shots=options.shots, limit=options.limit,
            batch_size=options.batch_size, checkpoint=options.checkpoint, among=among,
        )  # fmt: skip
    if among.first:
        print(json.dumps(scores.to_dict()) if options.json else scores.table())
    if options.output and among.first:
        scores.save(options.output)
    return OK
