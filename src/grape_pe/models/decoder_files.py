"""Save and load a `Decoder`, in the same format as the Hugging Face model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..extras import require
from .config import HF_NAMES, DecoderConfig
from .decoder import Decoder
from .remote_code import REMOTE_CODE, REMOTE_FILE, auto_map

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_decoder(model: Decoder, directory: str | os.PathLike[str]) -> Path:
    """Save a decoder, in a format that `AutoModelForCausalLM.from_pretrained` can load too.

    Files are replaced only after all of them have been written.

    Args:
        model: the decoder.
        directory: where to write; created if it does not exist.

    Returns:
        The directory.
    """
    st = require("safetensors.torch", "hf")
    directory = Path(directory)
    content = {"model_type": "grape", "architectures": ["GrapeForCausalLM"], "auto_map": auto_map()}
    content |= model.config.to_hf()
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory, prefix=".part-"))
    try:
        (scratch / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        (scratch / REMOTE_FILE).write_text(REMOTE_CODE)
        st.save_file(tensors, scratch / WEIGHTS, {"format": "pt"})
        for name in (WEIGHTS, REMOTE_FILE, CONFIG):
            os.replace(scratch / name, directory / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def load_decoder(directory: str | os.PathLike[str]) -> Decoder:
    """Load a decoder saved by `save_decoder` or by `save_pretrained` of the Hugging Face model.

    Args:
        directory: where to read.

    Returns:
        The decoder, on the CPU.
    """
    directory = Path(directory)
    config, tensors = _read_config(directory), _read_weights(directory)
    if config.tied:
        tensors.pop("lm_head.weight", None)
    with torch.device("meta"):
        model = Decoder(config)
    want = model.state_dict()
    wrong = sorted(want.keys() ^ tensors.keys()) or sorted(
        n for n in want if want[n].shape != tensors[n].shape
    )
    if wrong:
        raise ValueError(
            f"{directory / WEIGHTS} does not fit its {CONFIG}: {wrong[0]!r} and {len(wrong) - 1} other tensors "
            "are missing, unexpected or of another shape"
        )
    model.load_state_dict(tensors, assign=True)
    return model


def _read_config(directory: Path) -> DecoderConfig:
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"no {CONFIG} in {directory}; pass a directory written by save_decoder")
    content = json.loads(path.read_text())
    if content.get("model_type") != "grape":
        raise ValueError(
            f"{path} must have the model_type 'grape', got {content.get('model_type')!r}; "
            "load other models with transformers"
        )
    return DecoderConfig.from_hf({theirs: content.get(theirs) for theirs in HF_NAMES.values()})


def _read_weights(directory: Path) -> dict[str, Tensor]:
    st = require("safetensors.torch", "hf")
    path = directory / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(
            f"no {WEIGHTS} in {directory}; save the model with save_decoder (pickles are not supported, "
            "because they can run code)"
        )
    try:
        tensors: dict[str, Tensor] = st.load_file(path)
    except Exception as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    return tensors
