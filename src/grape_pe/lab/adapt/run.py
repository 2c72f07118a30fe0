"""`grape adapt`: adapt, train, measure and save one encoding, or several with the same budget.

    adapt_model("llama/", ["rope+grape-ap"], ["book.txt"], "out", Wishes(context=2048))

The same call continues after an interruption.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...hf import export
from ..compare.arms import Arm
from ..compare.job import PICTURE_TOKENS
from ..data import Source, open_dataset, open_source, prepare
from ..data.dataset import first_words
from ..errors import LabError
from ..evaluate import benchmarks, passkey
from ..files import replacing, write_json, write_text
from ..pretrained import check_source, identity_of, load_pretrained
from ..train.checkpoint import cause
from ..train.distributed import World, default_device
from ..train.feed import dataset_feed
from ..train.run_directory import RunDirectory, training_cost
from .checks import check_exportable, check_installed, check_root, read_arms
from .decoder import PretrainedDecoder, check_unchanged, largest_change
from .learned import heads, picture
from .report import LINES, RESULT, write_adapt_report
from .settings import PASSKEY, AdaptConfig, configured
from .trained import adapted, scaled, select_trained
from .trainer import AdaptTrainer, evaluation_file
from .wishes import Wishes

DATA, FINAL, STOCK = "data", "final", "stock"
#: scores of language tasks before and after
TASKS = "lm_eval-{}.json"
#: bytes of text per token, to estimate the size of the validation text
BYTES_A_TOKEN = 6
#: tokens on which logits are compared before and after `adapt`
SAMPLE = 128


@dataclass(frozen=True)
class Adapted:
    """The report, the models' directories, and the signal that stopped the run, or 0."""

    report: Path | None
    models: dict[str, Path]
    signal: int = 0


def adapt_model(
    model: str, encodings: Sequence[str], data: Sequence[str], out: str, wishes: Wishes, quiet: bool = False
) -> Adapted:
    """Run what is missing of one adapted model, or of a sweep over encodings, and write the report.

    Args:
        model: a Hugging Face directory or a GGUF file. data: files, directories or globs of text, or builtin.
        encodings: as on the command line, such as 'rope+fox[forget_bias=4]'; each of several has a directory.
    """
    job = _Job(Path(model), encodings, data, Path(out), wishes, quiet)
    for arm in job.arms:
        if signal := job.run(arm):
            return Adapted(None, {}, signal)
    report = write_adapt_report(job.root, {arm.label: job.directory(arm) for arm in job.arms})
    return Adapted(report, {arm.label: job.directory(arm) / FINAL for arm in job.arms})


class _Job:
    """A pretrained model, its text and the encodings it gets. Everything is checked before training."""

    def __init__(
        self,
        path: Path,
        encodings: Sequence[str],
        data: Sequence[str],
        root: Path,
        wishes: Wishes,
        quiet: bool,
    ) -> None:
        check_source(path)
        check_installed(wishes)
        self.arms, self.root, self.quiet = read_arms(encodings), root, quiet
        self.source = open_source(data)
        self.model, self.tokenizer = load_pretrained(path)
        source = (str(path), identity_of(path), self.model.config)
        self.configs = {arm.label: configured(wishes, arm, *source) for arm in self.arms}
        for arm in self.arms:
            RunDirectory(self.directory(arm), (DATA,)).check(self.configs[arm.label], resume=True)
        if len(self.arms) > 1:
            check_root(root, (DATA, "report.html", LINES), [arm.label for arm in self.arms])
        lengths = [length for config in self.configs.values() for length in config.adapt.lengths]
        if wishes.passkey:
            passkey.check_room(self.tokenizer, min(lengths))
        self.first = self._adapted(self.arms[0])
        for arm in self.arms[1:]:  # refuse what cannot be adapted
            self._adapted(arm)
        self.data = self._prepare(max(*lengths, wishes.eval_tokens, wishes.context))

    def directory(self, arm: Arm) -> Path:
        return self.root / arm.label if len(self.arms) > 1 else self.root

    def _adapted(self, arm: Arm) -> tuple[PretrainedDecoder, float]:
        """A model with the encoding of `arm`, and the largest change of its logits."""
        config = self.configs[arm.label]
        model = copy.deepcopy(self.model) if len(self.arms) > 1 else self.model
        tokens = torch.arange(min(SAMPLE, config.adapt.context, config.model.vocab_size))[None]
        with torch.no_grad():
            before = model(tokens).logits
        decoder = PretrainedDecoder(adapted(model, config))
        if config.adapt.export:
            check_exportable(model)
        measure = largest_change if scaled(config) else check_unchanged
        return decoder, measure(before, decoder, tokens)

    def _prepare(self, longest: int) -> Path:
        share = held_out_share(self.source, longest + 1)
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = str(Path(scratch, "tokenizer"))  # its name is part of the dataset's settings
            self.tokenizer.save_pretrained(tokenizer)
            return prepare(
                self.source, self.root / DATA, tokenizer=tokenizer, validation=share, show_progress=not self.quiet
            )  # fmt: skip

    def run(self, arm: Arm) -> int:
        """Train, measure and save one encoding; returns the signal that stopped it, or 0."""
        place, config = self.directory(arm), self.configs[arm.label]
        if (place / RESULT).is_file():
            return 0
        feed = dataset_feed(config, self.data)
        directory = RunDirectory(place, (DATA,))
        directory.open(config, feed.identity, resume=True)
        self._copy_before(arm)
        try:
            decoder, changed = self.first if arm is self.arms[0] else self._adapted(arm)
            self._measure(decoder.pretrained, config, place, "before")
            wrapped, world = select_trained(decoder.pretrained, config), World(device=default_device())
            trainer = AdaptTrainer(config, place, feed, open_dataset(self.data), decoder, world, self.quiet)
            outcome = trainer.run()
            if outcome.signal:
                return outcome.signal
            if wrapped is not None:
                decoder.pretrained = wrapped.merge_and_unload()
            if trainer.fade is not None:
                trainer.fade.take_out()
            self._save(decoder.pretrained, config, place)
            self._measure(decoder.pretrained.eval(), config, place, "after")
            decoder.cpu()
            drawn = picture(decoder, *first_words(self.data, PICTURE_TOKENS), str(config.model.encoding))
            write_text(place / "picture.json", json.dumps(drawn))
            trained = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
            result = {"changed_at_step_0": changed, "trained": trained, "heads": heads(decoder)}
            write_json(place / RESULT, result | training_cost(place, config))
        finally:
            directory.close()
        return 0

    def _copy_before(self, arm: Arm) -> None:
        """Reuse measurements before training, which are the same for all encodings that keep the logits."""
        same = [other for other in self.arms if not scaled(self.configs[other.label])]
        done = next((a for a in same if (self.directory(a) / RESULT).is_file()), None)
        if done is None or arm not in same:
            return
        for path in [evaluation_file(Path(), 0), *(Path(name.format("before")) for name in (TASKS, PASSKEY))]:
            source, target = self.directory(done) / path, self.directory(arm) / path
            if source.is_file() and not target.exists():
                write_text(target, source.read_text())

    def _save(self, model: Any, config: AdaptConfig, place: Path) -> None:
        writers = {FINAL: model.save_pretrained}
        if config.adapt.export:
            writers[STOCK] = lambda scratch: export(model, scratch)
        for name, write in writers.items():
            try:
                with replacing(place / name) as scratch:
                    write(str(scratch))
                    self.tokenizer.save_pretrained(str(scratch))
            except Exception as problem:  # safetensors and tokenizers have their own errors for a full disk
                raise LabError(
                    f"cannot write {place / name}: {cause(problem)}; the checkpoints are complete; fix this and run "
                    "the same command again"
                ) from None

    def _measure(self, model: Any, config: AdaptConfig, place: Path, when: str) -> None:
        """Language tasks and passkeys, unless their files exist."""
        model.to(default_device())
        settings, scores, found = config.adapt, place / TASKS.format(when), place / PASSKEY.format(when)
        if settings.tasks and not scores.exists():
            benchmarks.evaluate(
                model, self.tokenizer, settings.tasks, data=settings.task_data or None,
                limit=settings.task_limit or None, checkpoint=f"{config.model.encoding} {when}",
            ).save(scores)  # fmt: skip
        if settings.passkey and not found.exists():
            answers = passkey.passkey_scores(model, self.tokenizer, settings.lengths, cases=settings.passkey)
            write_json(found, {"scores": passkey.to_json(answers)})


def held_out_share(source: Source, tokens: int) -> float:
    """The share of the text to hold out, for about four times as many tokens."""
    size = source.size()
    if size is None:
        return 0.02
    share = 4 * tokens * BYTES_A_TOKEN / max(1, size)
    return round(min(0.25, max(0.005, share)), 4)
