"""The paper's tasks on local questions, with lm_eval's definitions and without a network.

DIR/TASK.jsonl has the fields of the published dataset, one question per line.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...extras import require
from ..errors import LabError

#: where lm_eval defines each task, and the fields its questions have
DEFINED = {
    "arc_easy": ("arc/arc_easy.yaml", ("question", "choices", "answerKey")),
    "arc_challenge": ("arc/arc_challenge.yaml", ("question", "choices", "answerKey")),
    "hellaswag": ("hellaswag/hellaswag.yaml", ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "openbookqa": ("openbookqa/openbookqa.yaml", ("question_stem", "choices", "answerKey")),
    "piqa": ("piqa/piqa.yaml", ("goal", "sol1", "sol2", "label")),
    "winogrande": ("winogrande/default.yaml", ("sentence", "option1", "option2", "answer")),
    "sciq": (
        "sciq/sciq.yaml",
        ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"),
    ),
}
REPLACED = """include: {include}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {file}}}}}
training_split: null
validation_split: null
test_split: test
"""


class EvaluationError(LabError):
    """Usage error of an evaluation: an unknown task, an unreadable checkpoint, a missing dataset."""


def check_questions(tasks: Sequence[str], data: Path) -> None:
    """Refuse tasks without local questions, and files with other fields."""
    for name in tasks:
        if name not in DEFINED:
            raise EvaluationError(f"--data has the tasks {', '.join(DEFINED)}; for {name} give --include")
        path = data / f"{name}.jsonl"
        if not path.is_file():
            raise EvaluationError(f"no questions of {name} in --data {data}: expected {path}")
        with open(path, encoding="utf-8") as file:
            _check_fields(path, file.readline(), DEFINED[name][1])


def _check_fields(path: Path, line: str, fields: Sequence[str]) -> None:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    missing = [name for name in fields if not isinstance(found, dict) or name not in found]
    if missing:
        raise EvaluationError(
            f"{path}, line 1 must be a JSON object with {', '.join(fields)}; {missing[0]} is missing"
        )


@contextmanager
def task_files(
    tasks: Sequence[str], include: str | os.PathLike[str] | None, data: str | os.PathLike[str] | None
) -> Iterator[str | os.PathLike[str] | None]:
    """A directory of task files: `include`, or a temporary one for the questions in `data`."""
    if data is None:
        yield include
        return
    theirs = require("lm_eval.tasks", "eval").__file__
    assert theirs is not None
    with tempfile.TemporaryDirectory() as place:
        for name in tasks:
            defined, file = Path(theirs).parent / DEFINED[name][0], (Path(data) / f"{name}.jsonl").resolve()
            text = REPLACED.format(name=name, include=json.dumps(str(defined)), file=json.dumps(str(file)))
            Path(place, f"{name}.yaml").write_text(text, encoding="utf-8")
        yield place
