"""The paper's loop in one command: text, training on several ranks, scores, and the page with tables and figures.

    python examples/paper_loop.py                       # a miniature, some minutes on two cores, nothing downloaded
    python examples/paper_loop.py --recipe paper-medium --data data/fineweb-edu-100B --ranks 8

The second line is the experiment of the paper on one node with 8 GPUs. What is finished is not done again, so a loop
that was stopped is continued by the same command. Settings of `grape train` may follow: --train.steps 100.

It needs: pip install 'grape-pe[lab,eval]'
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from grape_pe.lab.data import load_tokenizer, open_dataset

TASK = """task: continuation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
SMALL = ("--tokenizer", "bpe-1024", "--max-tokens", "1000000", "--validation", "0.05")
PROMPT, ANSWER, QUESTIONS, CHOICES = 48, 8, 200, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="demo", help="of grape train (default: demo)")
    parser.add_argument(
        "--encodings", default="rope,fox,grape-a-qk,grape-ap", help="NAME or NAME+kv, with commas"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of torchrun (default: 2)")
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="prepared text, on which the paper's seven tasks follow; without it a part of the built-in text, and a "
        "task made of it",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("results/paper"), help="(default: results/paper)")
    given, settings = parser.parse_known_args()
    data, tasks = (given.data, []) if given.data else miniature(given.out)
    runs = [given.out / "runs" / arm.replace("+", "-") for arm in given.encodings.split(",")]
    for arm, run in zip(given.encodings.split(","), runs, strict=True):
        shift = ["--kv-shift"] if arm.endswith("+kv") else []
        words = ["--encoding", arm.removesuffix("+kv"), *shift, "--data.source", data, *settings]
        if not (run / "final").is_dir():
            grape("train", given.recipe, *words, "--out", run, "--resume", ranks=given.ranks)
        if not (run / "lm_eval.json").exists():
            scores = ["--output", run / "lm_eval.json"]
            grape("eval", "lm", run / "final", *tasks, *scores, ranks=given.ranks)
    grape("report", "--paper", *runs, "--out", given.out / "paper.html")


def grape(*words: object, ranks: int = 0) -> None:
    """One command, shown before it is run; under torchrun if it takes ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [*launcher, "-m", "grape_pe.cli", *map(str, words)]
    print("$ python", *command, flush=True)
    code = subprocess.run([sys.executable, *command]).returncode
    if code:
        sys.exit(code)


def miniature(out: Path) -> tuple[Path, list[object]]:
    """A small text, and the options of `grape eval lm` for a task made of it: which of four pieces follows?"""
    data, tasks = out / "data", out / "tasks"
    grape("data", "prepare", "builtin", *SMALL, "--out", data)
    tasks.mkdir(exist_ok=True)
    questions = tasks / "continuation.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in continuations(data)))
    (tasks / "continuation.yaml").write_text(TASK.format(questions=json.dumps(str(questions.resolve()))))
    return data, ["--include", tasks, "--tasks", "continuation"]


def continuations(data: Path) -> list[dict[str, object]]:
    dataset, words, draw = open_dataset(data), load_tokenizer(data), random.Random(0)
    shard = max(dataset.manifest.of("val"), key=lambda shard: shard.tokens)
    tokens = dataset.read(shard, 0, shard.tokens).tolist()
    found: list[dict[str, object]] = []
    for start in draw.sample(range(len(tokens) - PROMPT - ANSWER), QUESTIONS):
        middle = start + PROMPT
        others = [draw.randrange(len(tokens) - ANSWER) for _ in range(CHOICES - 1)]
        pieces = [words.decode(tokens[at : at + ANSWER]) for at in (middle, *others)]
        order = draw.sample(range(CHOICES), CHOICES)
        choices = [pieces[i] for i in order]
        found.append(
            {"prompt": words.decode(tokens[start:middle]), "choices": choices, "answer": order.index(0)}
        )
    return found


if __name__ == "__main__":
    main()
