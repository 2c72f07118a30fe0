"""`grape eval lm CHECKPOINT`: lm_eval in process, on the paper's seven tasks or any others.

Both accuracies are stored: acc, and acc_norm (by the length of the answer) if the task has it. Under torchrun the
requests are shared among ranks; each rank then has all answers and the same scores as one process.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ...extras import require
from ..columns import aligned
from ..files import write_json
from ..pretrained import GGUF, load_pretrained
from ..train.checkpoint import cause
from ..train.distributed import World, default_device
from .questions import EvaluationError, check_questions, task_files

PAPER_TASKS = {
    "arc_easy": "ARC-E",
    "arc_challenge": "ARC-C",
    "hellaswag": "HellaSwag",
    "openbookqa": "OBQA",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
    "sciq": "SciQ",
}
METRICS = ("acc", "acc_norm")
#: lm_eval's kinds of requests, methods of its model
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
#: samples for the standard error of a score that is not a mean
BOOTSTRAP = 1000


@dataclass(frozen=True)
class TaskScore:
    """Accuracies of a task in [0, 1]; None for metrics that it lacks."""

    acc: float | None
    acc_norm: float | None
    acc_stderr: float | None
    acc_norm_stderr: float | None
    samples: int


@dataclass(frozen=True)
class Scores:
    """A checkpoint's scores on every task."""

    checkpoint: str
    encoding: str | None
    shots: int
    limit: int | None
    tasks: dict[str, TaskScore]

    def average(self, metric: str) -> float | None:
        """Mean over the tasks; a task without acc_norm counts with its acc."""
        each = [s.acc if metric == "acc" or s.acc_norm is None else s.acc_norm for s in self.tasks.values()]
        known = [value for value in each if value is not None]
        return sum(known) / len(known) if known else None

    def table(self) -> str:
        """Tasks as columns, one row per metric, in percent ± standard error."""
        rows = [["", *(PAPER_TASKS.get(name, name) for name in self.tasks), "Avg."]]
        for metric in METRICS:
            each = [asdict(score) for score in self.tasks.values()]
            cells = [percent(score[metric], score[f"{metric}_stderr"]) for score in each]
            rows.append([metric, *(cell or "-" for cell in (*cells, percent(self.average(metric))))])
        return aligned(rows)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "average": {metric: self.average(metric) for metric in METRICS}}

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(Path(path), self.to_dict())


def percent(value: float | None, error: float | None = None) -> str:
    """50.00 ± 1.00; empty for None."""
    if value is None:
        return ""
    return f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] = tuple(PAPER_TASKS),
    *,
    include: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    shots: int = 0,
    limit: int | None = None,
    batch_size: int = 8,
    checkpoint: str = "model",
    among: World | None = None,
) -> Scores:
    """Run lm_eval on a Hugging Face model that is already in memory.

    Args:
        model: a transformers model: `GrapeForCausalLM`, an adapted model or any other.
        tokenizer: its tokenizer.
        tasks: names of lm_eval's tasks, or of task files in `include`.
        include: a directory of task files (YAML), which may point to local data.
        data: a directory with the questions of the paper's tasks, TASK.jsonl each, so that nothing is fetched.
        shots: examples in the prompt.
        limit: largest number of samples of each task.
        batch_size: samples per forward pass.
        checkpoint: name of the model in the scores.
        among: the ranks that share the requests, with equal models; all of them return the scores.
    """
    among = among or World()
    lm_eval = require("lm_eval", "eval")
    check_tasks(tasks, include, data)
    wrapper = require("lm_eval.models.huggingface", "eval").HFLM
    wrapped = wrapper(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
    for kind in REQUESTS:
        setattr(wrapped, kind, _shared(getattr(wrapped, kind), among))
    try:
        with task_files(tasks, include, data) as place:
            found = lm_eval.simple_evaluate(
                model=wrapped, tasks=list(tasks), num_fewshot=shots, limit=limit,
                task_manager=_task_manager(tasks, place), bootstrap_iters=BOOTSTRAP, log_samples=False,
            )  # fmt: skip
    except (ConnectionError, FileNotFoundError) as error:
        raise EvaluationError(
            f"a dataset could not be read: {error}. Without a network, download it beforehand or give "
            "local questions with --data, or task files with --include"
        ) from error
    encoding = model.config.to_dict().get("encoding")
    # lm_eval returns None if LOCAL_RANK is not 0
    scores = found and {name: _score(found, name) for name in tasks}
    return Scores(checkpoint, encoding, shots, limit, among.gathered(scores)[0])


def _shared(answer: Callable[..., list[Any]], among: World) -> Callable[[Sequence[Any]], list[Any]]:
    """A method of lm_eval's model with the requests shared among ranks and all answers on each."""

    def answered(requests: Sequence[Any]) -> list[Any]:
        mine = _own(requests, among)
        found = answer([requests[i] for i in mine], disable_tqdm=not among.first) if mine else []
        every = dict(chain.from_iterable(among.gathered(list(zip(mine, found, strict=True)))))
        return [every[i] for i in range(len(requests))]

    return answered


def _own(requests: Sequence[Any], among: World) -> list[int]:
    """This rank's requests: all of every `size`-th document, as the answers to one question share their prompt."""
    documents: dict[Any, int] = {}
    numbers = [documents.setdefault((each.task_name, each.doc_id), len(documents)) for each in requests]
    return [i for i, number in enumerate(numbers) if number % among.size == among.rank]


def check_tasks(
    tasks: Sequence[str],
    include: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
) -> None:
    """Refuse unknown tasks before a model is loaded."""
    if not tasks:
        raise EvaluationError(f"no task given; the paper's are {', '.join(PAPER_TASKS)}")
    if include is not None and data is not None:
        raise EvaluationError(
            "--include (task files) and --data (questions) exclude each other; leave one out"
        )
    if include is not None and not Path(include).is_dir():
        raise EvaluationError(f"--include must be a directory of task files, got {include}")
    if data is not None:
        check_questions(tasks, Path(data))
    else:
        _task_manager(tasks, include)


def _task_manager(tasks: Sequence[str], include: str | os.PathLike[str] | None) -> Any:
    """lm_eval's index of tasks; its thousands of own tasks are read only if one is needed."""
    index = require("lm_eval.tasks", "eval").TaskManager
    if include is not None:
        local = index(include_path=str(include), include_defaults=False)
        if set(tasks) <= set(local.all_tasks):
            return local
    manager = index(include_path=None if include is None else str(include))
    _check_tasks(tasks, manager.all_tasks)
    return manager


def _check_tasks(tasks: Sequence[str], known: Sequence[str]) -> None:
    for name in tasks:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "give its file's directory with --include"
            raise EvaluationError(f"lm_eval has no task {name!r}; {hint}")


def _score(found: dict[str, Any], name: str) -> TaskScore:
    result = found["results"].get(name)
    if result is None:
        raise EvaluationError(f"{name} is a group without a score of its own; name its tasks")
    names = [f"{metric}{suffix}" for metric in METRICS for suffix in ("", "_stderr")]
    values = {each: result.get(f"{each},none") for each in names}
    numbers = {each: float(x) if isinstance(x, (int, float)) else None for each, x in values.items()}
    return TaskScore(**numbers, samples=int(found["n-samples"][name]["effective"]))  # type: ignore[arg-type]


def load_checkpoint(checkpoint: str, tokenizer: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer from a directory, GGUF file or Hub name."""
    if checkpoint.endswith(GGUF):
        model, words = load_pretrained(Path(checkpoint))
        return model.to(default_device()), words
    transformers = require("transformers", "hf")
    require("grape_pe.hf", "hf")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        words = transformers.AutoTokenizer.from_pretrained(tokenizer or checkpoint)
    except Exception as error:  # transformers, tokenizers and safetensors have their own errors
        hint = "" if tokenizer else "; if it has no tokenizer, give one with --tokenizer"
        if (Path(checkpoint) / "final").is_dir():
            hint = f"; it is a run, whose model is {Path(checkpoint) / 'final'}"
        raise EvaluationError(f"cannot load {checkpoint}: {cause(error)}{hint}") from error
    return model.eval().to(default_device()), words
