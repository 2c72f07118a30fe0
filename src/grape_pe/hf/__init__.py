"""Hugging Face: the decoder as a `transformers` model, adapting pretrained models, exporting to stock ones.

Importing this registers the model, so that `AutoModelForCausalLM` can load it.
"""

from __future__ import annotations

from ..extras import require

require("transformers", "hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from .adapter import adapt, new_parameters  # noqa: E402
from .adapter_files import load_adapted, load_adapter, save_adapted, save_adapter  # noqa: E402
from .cache import GrapeDynamicLayer, GrapeStaticLayer  # noqa: E402
from .config import GrapeConfig  # noqa: E402
from .exporter import export  # noqa: E402
from .model import GrapeForCausalLM, GrapeModel  # noqa: E402

AutoConfig.register("grape", GrapeConfig, exist_ok=True)
AutoModel.register(GrapeConfig, GrapeModel, exist_ok=True)
AutoModelForCausalLM.register(GrapeConfig, GrapeForCausalLM, exist_ok=True)

__all__ = [
    "GrapeConfig",
    "GrapeDynamicLayer",
    "GrapeForCausalLM",
    "GrapeModel",
    "GrapeStaticLayer",
    "adapt",
    "export",
    "load_adapted",
    "load_adapter",
    "new_parameters",
    "save_adapted",
    "save_adapter",
]
