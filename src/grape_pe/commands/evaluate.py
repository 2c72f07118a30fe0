"""`grape eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .errors import OK
from .parsers import Commands, Parser, add_command, names, natural, numbers, positive


def add_parsers(commands: Commands) -> None:
    group = add_command(commands, "eval", None, "score a model", "grape eval lm runs/x/final --limit 100")
    kinds = group.add_subparsers(title="evaluations", metavar="WHAT", required=True)
    parser = add_command(
        kinds, "lm", run_lm, "accuracy on language tasks, by lm_eval",
        "grape eval lm runs/x/final --tasks arc_easy,sciq --limit 100",
        "Accuracy on language tasks, by lm_eval. On 8 GPUs: torchrun --nproc_per_node=8 -m grape_pe.cli eval lm …",
    )  # fmt: skip
    add = parser.option
    add("checkpoint", "CHECKPOINT", "a model's directory or Hub name")
    add("--tasks", "NAMES", "separated by commas (default: the paper's seven)", type=names)
    add("--include", "DIR", "a directory of local task files")
    add("--data", "DIR", "a directory with the questions of the paper's tasks, TASK.jsonl each")
    add("--shots", "N", "few-shot examples", 0, natural)
    add("--limit", "N", "most questions per task", type=positive)
    add("--batch-size", "N", "questions per batch", 8, positive)
    _add_common(parser)
    help, example = (
        "find a number in a long text, by length and depth",
        "grape eval passkey adapted/final --lengths 1024,4096",
    )
    parser = add_command(kinds, "passkey", run_passkey, help, example)
    add = parser.option
    add("checkpoint", "CHECKPOINT", "a model's directory, GGUF file or Hub name")
    add("--lengths", "N,N", "text lengths in tokens", (256, 512, 1024, 2048, 4096), numbers)
    add("--cases", "N", "texts for each length and depth", 4, positive)
    add("--others", "N", "distractor numbers in each text", 0, natural)
    _add_common(parser)


def _add_common(parser: Parser) -> None:
    parser.option("--tokenizer", "NAME", "directory or Hub name of the tokenizer (default: the model's)")
    parser.option("--output", "FILE", "write the scores to this JSON file", type=Path)
    parser.flag("--json")


def run_passkey(options: argparse.Namespace) -> int:
    from ..lab.evaluate.benchmarks import load_checkpoint
    from ..lab.evaluate.passkey import passkey_scores, passkey_table, to_json
    from ..lab.files import write_json

    model, tokenizer = load_checkpoint(options.checkpoint, options.tokenizer)
    found = passkey_scores(model, tokenizer, options.lengths, cases=options.cases, others=options.others)
    print(json.dumps(to_json(found)) if options.json else passkey_table(found))
    if options.output:
        write_json(options.output, to_json(found))
    return OK


def run_lm(options: argparse.Namespace) -> int:
    from ..lab.evaluate.benchmarks import PAPER_TASKS, check_tasks, evaluate, load_checkpoint
    from ..lab.train.distributed import world

    tasks = options.tasks or list(PAPER_TASKS)
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
