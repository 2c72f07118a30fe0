"""Saving the trained model as a Hugging Face directory with its tokenizer, and loading it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ...models import Decoder, DecoderConfig, load_decoder, save_decoder
from ..errors import LabError
from .checkpoint import cause, load_weights
from .distributed import World
from .feed import Feed, open_feed
from .run_directory import CONFIG, read_config


def export_final(model: nn.Module, config: DecoderConfig, directory: Path, feed: Feed, among: World) -> None:
    """Gather the weights and write them on the first rank."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not among.first:
        return
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(whole, assign=True)
    try:
        save_decoder(decoder, directory)
        if feed.directory is not None:
            from ..data import hf_tokenizer

            hf_tokenizer(feed.directory).save_pretrained(str(directory))
    except Exception as problem:  # safetensors and tokenizers have their own errors for a full disk
        raise LabError(
            f"cannot write {directory}: {cause(problem)}; "
            "the checkpoints are complete; fix this and continue with --resume"
        ) from None


def load_model(path: str | os.PathLike[str]) -> Decoder:
    """The decoder of a run (its final model or newest checkpoint), of a checkpoint, or of a model directory.

    Args:
        path: a run, a checkpoint or a model directory.
    """
    path = Path(path)
    for place in (path, path / "final"):
        if (place / "config.json").exists():
            return _loaded(place)
    checkpoint, run = path, path.parent.parent
    if (path / CONFIG).is_file():
        found = sorted((path / "checkpoints").glob("step-*"))
        if not found:
            raise LabError(
                f"{path} has no checkpoint yet; its first is written after train.checkpoint_every steps"
            )
        checkpoint, run = found[-1], path
    if not (run / CONFIG).is_file():
        raise LabError(f"{path} is not a run, a checkpoint or a model directory; grape train writes them")
    config = read_config(run)
    decoder = Decoder(config.decoder(open_feed(config, World()).batches.vocab_size))
    load_weights(decoder, checkpoint)
    return decoder


def _loaded(place: Path) -> Decoder:
    try:
        return load_decoder(place)
    except Exception as problem:  # of safetensors, or of a wrong config.json
        raise LabError(
            f"cannot load the model in {place}: {cause(problem)}; restore its files, or name a checkpoint"
        ) from None


def tokenizer_directory(path: str | os.PathLike[str]) -> Path:
    """The directory of the model's tokenizer; `path` as for `load_model`."""
    path = Path(path)
    for place in (path, path / "final", path.parent.parent / "final"):
        if (place / "tokenizer.json").exists():
            return place
    run = path if (path / CONFIG).is_file() else path.parent.parent
    if not (run / CONFIG).is_file():
        raise LabError(f"no tokenizer.json in {path}; give a run or a model directory that has one")
    feed = open_feed(read_config(run), World())
    if feed.directory is None:
        raise LabError(f"{path} was trained on a generated task, which has no text")
    return feed.directory
