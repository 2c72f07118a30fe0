"""`grape adapt`: adapt, train, measure and save, one encoding or several with the same budget.

    adapt_model("llama/", ["rope+grape-ap"], ["book.txt"], "out", Wishes(context=2048))

The same call after a kill goes on where it stopped.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ..compare.arms import Arm
from ..data import DatasetBatches, Source, open_dataset, open_source, prepare
from ..errors import LabError
from ..evaluate import benchmarks, passkey
from ..files import SCRATCH, write_json, write_text
from ..pretrained import check_source, identity_of, load_pretrained
from ..train.checkpoint import cause
from ..train.distributed import World, default_device
from ..train.feed import Feed
from ..train.run_directory import RunDirectory, read_metrics
from .checks import check_exportable, check_installed, check_root, read_arms
from .decoder import PretrainedDecoder, check_unchanged, largest_change
from .learned import heads, picture
from .report import LINES, RESULT, write_adapt_report
from .settings import PASSKEY, AdaptConfig, Wishes
from .trained import adapted, scaled, select_trained
from .trainer import AdaptTrainer, evaluation_file

DATA, FINAL, STOCK = "data", "final", "stock"
#: scores of language tasks before and after
TASKS = "lm_eval-{}.json"
#: bytes of text for each token, to hold out enough of it
BYTES_A_TOKEN = 6
#: tokens on which logits are compared before and after `adapt`
SAMPLE = 128


@dataclass(frozen=True)
class Adapted:
    """How it ended: the report, the models' directories, and the signal that stopped it, or 0."""

    report: Path | None
    models: dict[str, Path]
    signal: int = 0


def adapt_model(
    model: str, encodings: Sequence[str], data: Sequence[str], out: str, wishes: Wishes, quiet: bool = False
) -> Adapted:
    """Run what is missing of one adapted model, or of a sweep over encodings, and write the report.

    Args:
        model: a Hugging Face directory or a GGUF file. data: files, directories or globs of text, or builtin.
        encodings: as on the command line, such as 'rope+fox[forget_bias=4]'; of several each has a directory.
    """
    job = _Job(Path(model), encodings, data, Path(out), wishes, quiet)
    for arm in job.arms:
        if signal := job.run(arm):
            return Adapted(None, {}, signal)
    report = write_adapt_report(job.root, {arm.label: job.directory(arm) for arm in job.arms})
    return Adapted(report, {arm.label: job.directory(arm) / FINAL for arm in job.arms})


class _Job:
    """A pretrained model, its text and the encodings it is to get; made only if all of it can be done."""

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
        self.configs = {arm.label: wishes.config(arm, *source) for arm in self.arms}
        for arm in self.arms:
            RunDirectory(self.directory(arm), (DATA,)).check(self.configs[arm.label], resume=True)
        if len(self.arms) > 1:
            check_root(root, (DATA, "report.html", LINES), [arm.label for arm in self.arms])
        if wishes.passkey:
            passkey.check_room(self.tokenizer, min(self._lengths(self.arms[0])))
        self.first = self._adapted(self.arms[0])
        for arm in self.arms[1:]:
            self._adapted(arm)
        self.data = self._prepare(wishes)

    def directory(self, arm: Arm) -> Path:
        return self.root / arm.label if len(self.arms) > 1 else self.root

    def _adapted(self, arm: Arm) -> tuple[Any, float]:
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

    def _lengths(self, arm: Arm) -> list[int]:
        return self.configs[arm.label].adapt.lengths

    def _prepare(self, wishes: Wishes) -> Path:
        longest = max(max(self._lengths(arm)) for arm in self.arms)
        share = held_out_share(self.source, max(longest, wishes.eval_tokens, wishes.context) + 1)
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch, "tokenizer")
            self.tokenizer.save_pretrained(str(place))
            return prepare(
                self.source,
                self.root / DATA,
                tokenizer=str(place),
                validation=share,
                show_progress=not self.quiet,
            )

    def run(self, arm: Arm) -> int:
        """Train, measure and save one encoding; returns the signal that stopped it, or 0."""
        place, config = self.directory(arm), self.configs[arm.label]
        if (place / RESULT).is_file():
            return 0
        dataset = open_dataset(self.data)
        batches = DatasetBatches(dataset, config.data.sequence, config.train.batch, config.seed)
        identity = sha256((self.data / "manifest.json").read_bytes()).hexdigest()[:16]
        directory = RunDirectory(place, (DATA,))
        directory.open(config, {"manifest": identity}, resume=True)
        self._copy_before(arm)
        try:
            decoder, changed = self.first if arm is self.arms[0] else self._adapted(arm)
            return _Run(config, place, Feed(batches, {}), dataset, self.tokenizer, self.quiet).run(
                decoder, changed
            )
        finally:
            directory.close()

    def _copy_before(self, arm: Arm) -> None:
        """What was measured before training is the same for all encodings that leave the logits as they are."""
        same = [other for other in self.arms if not scaled(self.configs[other.label])]
        done = next((a for a in same if (self.directory(a) / RESULT).is_file()), None)
        if done is None or arm not in same:
            return
        for path in [evaluation_file(Path(), 0), *(Path(name.format("before")) for name in (TASKS, PASSKEY))]:
            source, target = self.directory(done) / path, self.directory(arm) / path
            if source.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                write_text(target, source.read_text())


@dataclass
class _Run:
    """One encoding, from step 0 to its saved model."""

    config: AdaptConfig
    directory: Path
    feed: Feed
    dataset: Any
    tokenizer: Any
    quiet: bool

    def run(self, decoder: PretrainedDecoder, changed: float) -> int:
        model = decoder.pretrained
        self._measure(model, "before")
        wrapped = select_trained(model, self.config)
        world = World(device=default_device())
        trainer = AdaptTrainer(
            self.config, self.directory, self.feed, self.dataset, decoder, world, self.quiet
        )
        outcome = trainer.run()
        if outcome.signal:
            return outcome.signal
        if wrapped is not None:
            decoder.pretrained = model = wrapped.merge_and_unload()
        if trainer.fade is not None:
            trainer.fade.take_out()
        self._save(model)
        self._measure(model.eval(), "after")
        decoder.cpu()
        write_text(self.directory / "picture.json", _json(picture(decoder, self.dataset, self._name)))
        trained = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
        result = {
            "changed_at_step_0": changed,
            "trained": trained,
            "heads": heads(decoder),
            **_cost(self.directory),
        }
        write_json(self.directory / RESULT, result)
        return 0

    @property
    def _name(self) -> str:
        return str(self.config.model.encoding)

    def _save(self, model: Any) -> None:
        from ...hf import export

        writers = {FINAL: model.save_pretrained} | (
            {STOCK: lambda place: export(model, place)} if self.config.adapt.export else {}
        )
        for name, write in writers.items():
            place, scratch = self.directory / name, self.directory / f"{SCRATCH}{name}"
            try:
                shutil.rmtree(scratch, ignore_errors=True)
                write(str(scratch))
                self.tokenizer.save_pretrained(str(scratch))
                shutil.rmtree(place, ignore_errors=True)
                scratch.rename(place)
            except Exception as problem:  # a full disk is an error of their own in safetensors and tokenizers
                raise LabError(
                    f"cannot write {place}: {cause(problem)}; the checkpoints are complete; fix this and run "
                    "the same command again"
                ) from None

    def _measure(self, model: Any, when: str) -> None:
        """Language tasks and passkeys, unless it is done."""
        model.to(default_device())
        self._score(model, when)
        settings, place = self.config.adapt, self.directory / PASSKEY.format(when)
        if settings.passkey and not place.exists():
            found = passkey.passkey_scores(model, self.tokenizer, settings.lengths, cases=settings.passkey)
            write_json(place, {"scores": passkey.to_json(found)})

    def _score(self, model: Any, when: str) -> None:
        settings, place = self.config.adapt, self.directory / TASKS.format(when)
        if not settings.tasks or place.exists():
            return
        scores = benchmarks.evaluate(
            model, self.tokenizer, settings.tasks, data=settings.task_data or None,
            limit=settings.task_limit or None, checkpoint=f"{self._name} {when}",
        )  # fmt: skip
        scores.save(place)


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def held_out_share(source: Source, tokens: int) -> float:
    """The share of the text to hold out, so that it has about four times so many tokens."""
    size = source.size()
    if size is None:
        return 0.02
    share = 4 * tokens * BYTES_A_TOKEN / max(1, size)
    return round(min(0.25, max(0.005, share)), 4)


def _cost(directory: Path) -> dict[str, Any]:
    """Speed and memory of training, from the run's metrics."""
    lines = [line for line in read_metrics(directory) if line["kind"] == "train"]
    speeds = sorted(line["tokens_per_second"] for line in lines)
    return {
        "tokens_per_second": speeds[len(speeds) // 2],
        "peak_memory_bytes": max(line["memory_bytes"] for line in lines),
        "tokens": max(line["tokens"] for line in lines),
    }
