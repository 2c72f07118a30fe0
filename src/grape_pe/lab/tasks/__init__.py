"""Probes of length generalisation: small problems with one right answer, made on the fly.

task = build_task("flip-flop")
batches = TaskBatches(task, batch=16, seed=0)      # for the trainer
scores = score(model, task, samples=64)            # at 1 to 16 times the training length
"""

from .base import Case, Task
from .batches import TaskBatches
from .registry import build_task, names
from .scoring import Score, score

__all__ = ["Case", "Score", "Task", "TaskBatches", "build_task", "names", "score"]
