"""Training of an adapted model, with evaluations at several lengths before, during and after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ...hf.rotation_fade import RotationFade
from ..data import Batch, Dataset
from ..evaluate.lengths import evaluate_language
from ..files import read_json, write_json
from ..train.checkpoint import TrainingState
from ..train.distributed import World
from ..train.feed import Feed
from ..train.rollback import Rise
from ..train.signals import StopSignals
from ..train.trainer import Outcome, Trainer
from .decoder import PretrainedDecoder
from .settings import AdaptConfig
from .trained import optimizer_of

EVALUATIONS = "evaluations"
AGAIN = "remove it; the same command measures again"


def evaluation_file(directory: Path, step: int) -> Path:
    return directory / EVALUATIONS / f"step-{step:08d}.json"


class AdaptTrainer(Trainer):
    """Trains parameters that require a gradient; checkpoints contain these alone."""

    saves_frozen = False
    config: AdaptConfig

    def __init__(
        self, config: AdaptConfig, directory: Path, feed: Feed, dataset: Dataset,
        model: PretrainedDecoder, among: World, quiet: bool,
    ) -> None:  # fmt: skip
        self.adapted, self.dataset = model, dataset
        super().__init__(config, directory, feed, among, quiet)
        steps = config.adapt.fade
        self.fade = RotationFade(model.pretrained, steps) if steps else None
        self._set_rotation(self.progress.step)

    def _build(self) -> Any:
        return self.adapted

    def _flops(self) -> None:
        return None

    def _optimizer(self) -> torch.optim.Optimizer:
        return optimizer_of(self.adapted.pretrained, self.config)

    def _set_rotation(self, done: int) -> None:
        if self.fade is not None:
            self.fade.set(done)

    def _update(self, step: int, parts: list[Batch], rate: float, signals: StopSignals) -> int:
        stop = super()._update(step, parts, rate, signals)
        self._set_rotation(step + 1)
        return stop

    def _go_back(self, rise: Rise) -> None:
        super()._go_back(rise)
        self._set_rotation(self.progress.step)

    def run(self) -> Outcome:
        if self.progress.step == 0:
            self._measure_before()
        return super().run()

    def _measure_before(self) -> None:
        """Evaluate at step 0, unless a run that was killed before its first checkpoint did."""
        place = evaluation_file(self.directory, 0)
        if place.exists():
            loss = float(read_json(place, AGAIN)["val_loss"])
            self.progress = TrainingState(0, loss, loss, 0)
        else:
            self._validate(0)

    def _validate(self, done: int) -> None:
        """Also the loss at every length, unless this is for a checkpoint alone."""
        super()._validate(done)
        if done == 0 or self._due(done, self.config.train.eval_every):
            self._measure_lengths(done)

    def _measure_lengths(self, done: int) -> None:
        began, settings = time.perf_counter(), self.config.adapt
        ends = done in (0, self.config.train.steps)
        self.decoder.eval()
        found = evaluate_language(
            self.decoder, self.dataset, settings.context, factors=settings.factors,
            windows=(None, settings.context) if ends else (None,), tokens=settings.eval_tokens,
        )  # fmt: skip
        place = evaluation_file(self.directory, done)
        seconds = time.perf_counter() - began
        write_json(place, {"val_loss": self.progress.validation_loss, "seconds": seconds, **found})

    def _export(self) -> None:
        """The caller writes the model after merging LoRA."""
