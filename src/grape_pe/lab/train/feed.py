"""Batches of `data.source`: the built-in corpus, a prepared directory, or a generated task."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data import Batches, DatasetBatches, builtin, open_dataset
from ..errors import LabError
from .distributed import World

TASK = "task:"


@dataclass(frozen=True)
class Feed:
    """Batches, the identity of their data, and the prepared directory if there is one."""

    batches: Batches
    identity: dict[str, Any]
    directory: Path | None = None


def open_feed(config: RunConfig, among: World) -> Feed:
    """Open the data of a run; the first rank prepares the built-in corpus if needed."""
    if config.data.source.startswith(TASK):
        return _task_feed(config)
    if among.first:
        _directory(config)
    among.barrier()
    return dataset_feed(config, _directory(config))


def dataset_feed(config: RunConfig, directory: Path) -> Feed:
    """Batches of a prepared dataset."""
    data, dataset = config.data, open_dataset(directory)
    batches = DatasetBatches(dataset, data.sequence, config.train.batch, config.seed, data.documents)
    vocabulary = config.model.vocab_size
    if vocabulary and vocabulary < dataset.vocab_size:
        raise LabError(
            f"model.vocab_size must cover the {dataset.vocab_size} tokens of {directory}, got {vocabulary}; "
            "set it to 0 to use theirs"
        )
    manifest = (directory / "manifest.json").read_bytes()
    return Feed(batches, {"manifest": sha256(manifest).hexdigest()[:16]}, directory)


def _directory(config: RunConfig) -> Path:
    data = config.data
    return builtin(tokenizer=data.tokenizer) if data.source == "builtin" else Path(data.source)


def _task_feed(config: RunConfig) -> Feed:
    from ..tasks import TaskBatches, build_task

    name = config.data.source.removeprefix(TASK)
    task = build_task(name, **config.data.task_options)
    return Feed(TaskBatches(task, config.train.batch, config.seed), {"task": repr(task)})


def vocabulary(config: RunConfig) -> int:
    """Vocabulary size of the data of a run, if possible without preparing them."""
    if config.model.vocab_size:
        return config.model.vocab_size
    if config.data.source.startswith(TASK):
        return _task_feed(config).batches.vocab_size
    size = config.data.tokenizer.removeprefix("bpe-")
    if config.data.source == "builtin" and size.isdigit():
        return int(size)
    return open_dataset(_directory(config)).vocab_size
