"""Training: one loop for a laptop and for a cluster.

    outcome = train(load("small", {"model.encoding": "grape-ap"}), "runs/ap")

The batch of a step depends on the seed and the step alone, and nothing else is random: a run that is killed and
continued gives the same weights, to the last bit, as one that is not, on the same kind and number of processes.
"""

from __future__ import annotations

import math
import os
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...extras import require
from ...models import Decoder
from ..config import RunConfig
from ..data import Batch, prefetch
from ..errors import Diverged, LabError
from ..progress import ProgressLine
from .checkpoint import Checkpoints
from .distributed import World, check_split, world
from .encoding_metrics import encoding_summary, whole
from .estimate import flops_per_token, peak_flops, peak_memory
from .feed import Feed, open_feed
from .memory import PausedCollector, freed_memory_kept
from .metrics import Metrics
from .optimization import adamw, initialise, learning_rate
from .profile import Profile
from .rollback import Rise, batch_of, look
from .run_directory import RunDirectory
from .saved_model import export_final
from .sharding import gradients_exchanged, spread
from .sharing import SharedBatches
from .signals import StopSignals
from .unread import Taken, Unread
from .validation import batch_loss, mean_loss


@dataclass(frozen=True)
class Outcome:
    """The result of a run; figures are those of this process.

    Args:
        directory: the run's directory.
        step: the last step.
        validation_loss: at the end; None if it was not measured.
        best_loss: the lowest validation loss.
        tokens_per_second: training speed.
        seconds: time spent in training.
        peak_memory_bytes: largest memory of this process.
        signal: the signal that stopped the run, or 0.
    """

    directory: Path
    step: int
    validation_loss: float | None
    best_loss: float | None
    tokens_per_second: float
    seconds: float
    peak_memory_bytes: int
    signal: int = 0


def train(
    config: RunConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    quiet: bool = False,
    start: Path | None = None,
) -> Outcome:
    """Train, or continue, the run in the directory `out`.

    Args:
        config: the recipe, from `load`.
        out: the run's directory.
        resume: continue from the newest checkpoint in `out`; without a checkpoint, start fresh.
        quiet: no progress line.
        start: begin from this checkpoint of another run with the same settings so far.
    """
    _check_installed(config)
    with world(Path(out)) as among:
        check_split(config, among.size)
        config.decoder(1)  # refuse a wrong encoding before reading data
        directory = RunDirectory(out)
        among.check(lambda: directory.check(config, resume=resume))
        feed = open_feed(config, among)
        among.share_sequences(config.train.context_parallel)
        try:
            among.check(lambda: directory.open(config, feed.identity, resume=resume))
            return Trainer(config, directory.path, feed, among, quiet, start).run()
        except OSError as failed:
            raise LabError(
                f"cannot read or write {failed.filename or out}: {failed.strerror or failed}; "
                "the checkpoints are complete; fix this and continue with --resume"
            ) from None
        finally:
            directory.close()


def _check_installed(config: RunConfig) -> None:
    """Refuse a run whose later steps would lack a package."""
    for module in ("safetensors", "tokenizers", "transformers", *["tensorboard"] * config.log.tensorboard):
        if find_spec(module) is None:
            require(module, "lab")
    if config.log.wandb:
        require("wandb", "wandb")


class Trainer:
    """A model, its optimizer, its data and its directory."""

    saves_frozen = True  # whether checkpoints hold parameters that are not trained

    def __init__(
        self, config: RunConfig, directory: Path, feed: Feed, among: World, quiet: bool, start: Path | None = None
    ) -> None:  # fmt: skip
        self.config, self.directory, self.feed, self.world, self.quiet = config, directory, feed, among, quiet
        self.batches = feed.batches if among.parallel is None else SharedBatches(feed.batches, among.parallel)
        self.decoder = self._build()
        self.flops = self._flops()
        self.model: nn.Module = spread(self.decoder, config.train, among)
        self.optimizer = self._optimizer()
        self.checkpoints = Checkpoints(
            directory / "checkpoints", config.train.keep, among, config.train.checkpoint_at, self.saves_frozen
        )
        self.checkpoints.clean()
        self.progress = self.checkpoints.restore(self.model, self.optimizer, start)
        self.metrics = self._open_metrics() if among.first else None
        title = f"{config.name} {config.model.encoding}"
        self.line = ProgressLine(title, self.progress.step, config.train.steps, quiet or not among.first)
        self.validated = ""
        self.tokens, self.seconds, self.speed = 0, 0.0, 0.0
        self.unread, self.last = Unread(among.device), Taken(0, math.nan, math.nan)
        #: 1 after a loss or gradient that is not finite: later steps are not applied
        self.broken = torch.zeros((), device=among.device)
        self.profile = Profile(directory, config.log.profile, among)

    def _build(self) -> Any:
        """The model before its first step."""
        decoder = Decoder(self.config.decoder(self.feed.batches.vocab_size))
        initialise(decoder, self.config.seed)
        return decoder

    def _optimizer(self) -> torch.optim.Optimizer:
        return adamw(self.decoder, self.config.train)

    def _flops(self) -> float | None:
        """FLOPs of a token in training, if they are known."""
        return flops_per_token(self.decoder, self.config.data.sequence)

    def run(self) -> Outcome:
        """Train to the last step, or until a signal asks to stop."""
        stopped = 0
        kept = freed_memory_kept() if self.world.device.type == "cpu" else nullcontext()
        try:
            # signals are handled to the end: a cluster may send two, also while this saves
            with kept, StopSignals() as signals, PausedCollector() as self.collector, self.profile:
                stopped = self._train(signals)
                self._save()
                self.checkpoints.finish()
                if not stopped:
                    self._export()
        finally:
            self.line.close()
            if self.metrics is not None:
                self.metrics.close()
        return Outcome(
            directory=self.directory, step=self.progress.step, validation_loss=self.progress.validation_loss,
            best_loss=self.progress.best_loss, tokens_per_second=self.tokens / max(self.seconds, 1e-9),
            seconds=self.seconds, peak_memory_bytes=peak_memory(self.world.device), signal=stopped,
        )  # fmt: skip

    def _train(self, signals: StopSignals) -> int:
        """All remaining steps, going back after a rise of the loss; returns the signal that stops, or 0."""
        while True:
            try:
                return self._steps(signals)
            except Rise as rise:
                self._go_back(rise)

    def _steps(self, signals: StopSignals) -> int:
        steps, rollbacks = range(self.progress.step, self.config.train.steps), self.progress.rollbacks
        numbers = (batch_of(step, rollbacks) for step in steps)
        with closing(prefetch(self.batches, numbers, self._rows)) as coming:
            for step, (_, parts) in zip(steps, coming, strict=True):
                stopped = self._train_step(step, parts, signals)
                if stopped:
                    return stopped
        return 0

    def _go_back(self, rise: Rise) -> None:
        """Continue from the last checkpoint before a rise, with the batches after it."""
        self.checkpoints.go_back(rise, self.progress.rollbacks, self.config.train.rollbacks)
        self.progress = self.checkpoints.restore(self.model, self.optimizer)
        self.broken.zero_()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = self._open_metrics()

    def _open_metrics(self) -> Metrics:
        return Metrics(self.directory, self.config, self.progress.step, self.progress.rollbacks)

    def _export(self) -> None:
        export_final(self.model, self.decoder.config, self.directory / "final", self.feed, self.world)

    def _rows(self, _step: int) -> list[range]:
        """The rows of this rank's group in a batch, split into micro-batches."""
        share = self.world.rows(self.config.train.batch)
        size = self.config.train.micro_batch or len(share)
        return [range(start, min(start + size, share.stop)) for start in range(share.start, share.stop, size)]

    def _train_step(self, step: int, parts: list[Batch], signals: StopSignals) -> int:
        """One optimizer step, logging, validation and checkpoint; returns the signal that stops, or 0."""
        done, settings = step + 1, self.config.train
        rate = learning_rate(step, settings)
        with self.profile.of(done):
            stop = self._update(step, parts, rate, signals)
        self.progress = replace(self.progress, step=done, validation_loss=None)
        self.collector.after(done)
        logs = done % self.config.log.every == 0 or done == settings.steps
        validates = self._due(done, settings.eval_every) or self._due(done, settings.checkpoint_every)
        saves = validates or done in settings.checkpoint_at
        if logs or saves or stop:
            self._read()
        if logs:
            self._log(done, rate)
        status = f"loss {self.last.loss:.4f}{self.validated}  {self.speed:,.0f} tokens/s"
        self.line.show(done, status, last=done == settings.steps)
        if validates:
            self._validate(done)
        if done % (settings.checkpoint_every or settings.steps) == 0 or done in settings.checkpoint_at:
            self._save()
        return stop

    def _due(self, done: int, every: int) -> bool:
        return done == self.config.train.steps or (every > 0 and done % every == 0)

    def _update(self, step: int, parts: list[Batch], rate: float, signals: StopSignals) -> int:
        """Gradients of the global batch and one step along them; returns the signal that stops, or 0.

        The host does not wait for the device here, so that it can queue the next step: ranks agree through host
        memory, and loss and norm stay on the device in `unread`.
        """
        self.model.train()
        self.unread.begin()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)  # of groups with a rate of their own
        counts = [int((part.targets >= 0).sum()) for part in parts]
        predicted, tokens, written, *asked = self.world.total(
            sum(counts), sum(p.tokens.numel() for p in parts), self.checkpoints.written, *signals.counts()
        )
        self.checkpoints.check(written)
        summed = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, part in enumerate(parts, start=1):
            with gradients_exchanged(self.model, number == len(parts)):
                # the ranks' gradients are averaged, their losses must be summed
                loss = self._loss(part, predicted / self.world.size)
                loss.backward()
            summed += loss.detach().double() / self.world.size
        clip = self.config.train.clip or math.inf
        norm = whole(nn.utils.clip_grad_norm_(self.decoder.parameters(), clip)).double()
        self._apply(self.world.added(summed), norm)
        self.unread.add(step, summed, norm, int(tokens))
        return StopSignals.named(asked)

    def _apply(self, loss: Tensor, norm: Tensor) -> None:
        """Step the optimizer, unless loss or gradient is not finite or the gradient too large.

        With `found_inf` (as for GradScaler) a fused AdamW leaves weights, moments and step counts unchanged.
        """
        self.broken = torch.maximum(self.broken, (~(loss.isfinite() & norm.isfinite())).float())
        above = norm > (self.config.train.skip_above or math.inf)
        self.optimizer.found_inf = torch.maximum(self.broken, above.float())  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _read(self) -> None:
        """Read losses and norms of the latest steps: stop or go back on divergence, record skipped steps."""
        limit = self.config.train.skip_above or math.inf
        taken, tokens, seconds = self.unread.read()
        if self.config.train.rollback_above:
            self._look_for_a_rise(taken)
        for each in taken:
            self._check_finite(*each)
            if each.norm > limit and self.metrics is not None:
                self.metrics.write("skipped", each.step + 1, {"loss": each.loss, "grad_norm": each.norm})
        if taken:
            self.last, self.speed = taken[-1], tokens / seconds
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds

    def _look_for_a_rise(self, taken: list[Taken]) -> None:
        """Raise the first rank's `Rise` on all ranks; otherwise keep the losses."""
        seen, rise = look(self.progress.recent, taken, self.config.train.rollback_above)
        self.progress = replace(self.progress, recent=seen)
        noticed, *numbers = self.world.of_first(rise is not None, *(rise.args if rise else (0, 0, 0, 0)))
        if noticed:
            raise Rise(*numbers)

    def _loss(self, part: Batch, count: float) -> Tensor:
        return batch_loss(self.model, part, count, self.config.train.precision, self.world)

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.checkpoints.finish()
        raise Diverged(
            f"stopped at step {step}: the loss is {loss} and the gradient norm {norm}, before any weight was "
            f"changed by it; {self.checkpoints.last_good()}. A smaller train.lr or train.clip, or a longer "
            "train.warmup, may help"
        )

    def _validate(self, done: int) -> None:
        """Mean loss of the validation set, and statistics of the encoding."""
        loss, best = self._validation_loss(), self.progress.best_loss
        self.progress = replace(self.progress, validation_loss=loss)
        if best is None or loss < best:
            self.progress = replace(self.progress, best_loss=loss, best_step=done)
        self.validated = f"  validation {loss:.4f}"
        sample = self.feed.batches.validation(range(1)).tokens
        fitting = sample.shape[1] // self.world.sharing  # a rank's share of the memory
        values = encoding_summary(self.decoder, sample[:, :fitting].to(self.world.device))
        if self.metrics is not None:
            self.metrics.write("validation", done, {"loss": loss})
            self.metrics.write("encoding", done, {"values": values})

    def _validation_loss(self) -> float:
        self.model.eval()
        settings = self.config.train
        size = settings.micro_batch or max(1, settings.batch // self.world.groups)
        return mean_loss(self._loss, self.batches, settings.eval_sequences, size, self.world)

    def _save(self) -> None:
        if self.progress.step > 0:
            self.checkpoints.save(self.model, self.optimizer, self.progress)

    def _log(self, done: int, rate: float) -> None:
        if self.metrics is None:
            return
        speed, peak = self.speed, peak_flops(self.world.device)
        self.metrics.write("train", done, {
            "loss": self.last.loss, "lr": rate, "grad_norm": self.last.norm,
            "tokens": done * self.config.tokens_per_step, "tokens_per_second": speed,
            "mfu": None if peak is None or self.flops is None else self.flops * speed / (peak * self.world.size),
            "memory_bytes": peak_memory(self.world.device),
        })  # fmt: skip
