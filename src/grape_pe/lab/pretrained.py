"""Loading a pretrained model and its tokenizer: a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from ..extras import require
from .errors import LabError
from .train.checkpoint import cause

GGUF = ".gguf"


def check_source(path: Path) -> None:
    """Refuse other files before anything is loaded."""
    if path.suffix == GGUF and path.is_file():
        require("gguf", "adapt")
    elif not (path / "config.json").is_file():
        raise LabError(
            f"no model in {path}: expected a directory with config.json, or a {GGUF} file; "
            "download the model first (grape adapt reads local files only)"
        )


def identity_of(path: Path) -> str:
    """Hash of the names and sizes of the model's files, to refuse another model when a run continues."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    sizes = [(p.name, p.stat().st_size) for p in files]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]


def load_pretrained(path: Path) -> tuple[Any, Any]:
    """The model in float32 on the CPU, and its tokenizer."""
    check_source(path)
    transformers = require("transformers", "hf")
    require("grape_pe.hf", "hf")
    quantised = {"gguf_file": path.name} if path.suffix == GGUF else {}
    place = str(path.parent if quantised else path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **quantised)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **quantised)
    except Exception as problem:  # transformers, tokenizers and safetensors have their own errors
        raise LabError(f"cannot load {path}: {cause(problem)}") from problem
    if not tokenizer.is_fast:
        raise LabError(
            f"the tokenizer of {path} has no tokenizer.json; save a fast tokenizer beside the model"
        )
    if quantised:
        _dequantised(model, transformers)
    return model.eval(), tokenizer


def _dequantised(model: Any, transformers: Any) -> None:
    """Remove the quantization settings of GGUF, with which the float32 model could not be saved."""
    model.config.__dict__.pop("quantization_config", None)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    special = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = transformers.GenerationConfig(**special)
