"""Scores of a model on a probe, for each split and length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models import Decoder
from ...models.loss import IGNORE
from ..data.batches import Batch
from ..errors import LabError
from ..evaluate.lengths import stream_hidden
from .base import Case, Task
from .batches import TEST, draw

#: tokens of a batch; each cell reads at least one batch
TOKENS_AT_ONCE = 1 << 14
#: fewest rows of a cell
LEAST_ROWS = 8


@dataclass(frozen=True)
class Score:
    """Shares of right answers in one cell of the test, with the right tokens before each predicted one.

    Args:
        task: name of the probe.
        split: name of the split.
        length: length of the question.
        depth: where the answer is hidden, from 0 to 1; None for most probes.
        exact: share of rows whose whole answer is right.
        token: share of answer tokens that are right.
        samples: number of rows.
        answers: number of answer tokens.
        chance: `token` of a guess.
    """

    task: str
    split: str
    length: int
    depth: float | None
    exact: float
    token: float
    samples: int
    answers: int
    chance: float


def score(
    model: Decoder,
    task: Task,
    *,
    seed: int = 0,
    samples: int = 64,
    lengths: Iterable[int] | None = None,
    batch: int | None = None,
) -> list[Score]:
    """One score for each split, length and depth of the task's test.

    Args:
        model: the decoder.
        task: the probe.
        seed: of the test rows, which no training run draws from.
        samples: rows of each cell at the training length; longer cells use fewer rows and about as many
            tokens. `Score.samples` is the number used.
        lengths: 1, 2, 4, 8 and 16 times the training length unless given.
        batch: rows read together; by default as many as make 16k tokens.
    """
    if samples < 1 or (batch is not None and batch < 1):
        raise LabError(f"samples and batch must be at least 1, got {samples} and {batch}")
    if model.config.vocab_size < task.vocab_size:
        raise LabError(
            f"{task.name} has {task.vocab_size} tokens, the model knows {model.config.vocab_size}; give a model "
            "trained on this task"
        )
    cells = enumerate(task.cases(lengths))
    return [_score_case(model, task, case, (seed, TEST, i), samples, batch) for i, case in cells]


def _score_case(
    model: Decoder, task: Task, case: Case, path: tuple[int, ...], samples: int, batch: int | None
) -> Score:
    fit = max(1, TOKENS_AT_ONCE // draw(task, path, range(1), case).tokens.shape[1])
    count = min(samples, max(samples * task.length // case.length, fit, LEAST_ROWS))
    size = batch or fit
    exact = right = answers = 0
    for first in range(0, count, size):
        rows = draw(task, path, range(first, min(count, first + size)), case)
        hits, asked = answers_right(model, rows)
        exact += int((hits == asked).all(1).sum())
        right += int(hits.sum())
        answers += int(asked.sum())
    return Score(
        task.name, case.split, case.length, case.depth, exact / count, right / answers, count, answers,
        task.chance,
    )  # fmt: skip


@torch.inference_mode()
def answers_right(model: Decoder, rows: Batch) -> tuple[Tensor, Tensor]:
    """(n, T) bool each: where the likeliest token is the target, and where there is one."""
    targets = rows.targets.to(model.head.device)
    asked = targets != IGNORE
    hits = torch.zeros_like(asked)
    for first, hidden in stream_hidden(model, rows.tokens):
        span = slice(first, first + hidden.shape[1])
        here = asked[:, span]
        hits[:, span][here] = (hidden[here] @ model.head.T).argmax(-1) == targets[:, span][here]
    return hits, asked
