"""Hugging Face: the decoder as a `transformers` model, adapting pretrained models, exporting to stock ones.

Importing this registers the model, so that `AutoModelForCausalLM` can load it.
"""

from __future__ import annotations

from ..extras import require

require("transformers", "hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from .adapted import (  # noqa: E402
    GrapeLlamaForCausalLM,
    GrapeLlamaModel,
    GrapeQwen2ForCausalLM,
    GrapeQwen2Model,
    GrapeQwen3ForCausalLM,
    GrapeQwen3Model,
)
from .adapted_config import GrapeLlamaConfig, GrapeQwen2Config, GrapeQwen3Config  # noqa: E402
from .adapter import adapt, new_parameters  # noqa: E402
from .adapter_files import load_adapter, save_adapter  # noqa: E402
from .cache import GrapeDynamicLayer, GrapeStaticLayer  # noqa: E402
from .config import GrapeConfig  # noqa: E402
from .exporter import export  # noqa: E402
from .model import GrapeForCausalLM, GrapeModel  # noqa: E402

for _config, _model, _for_causal_lm in (
    (GrapeConfig, GrapeModel, GrapeForCausalLM),
    (GrapeLlamaConfig, GrapeLlamaModel, GrapeLlamaForCausalLM),
    (GrapeQwen2Config, GrapeQwen2Model, GrapeQwen2ForCausalLM),
    (GrapeQwen3Config, GrapeQwen3Model, GrapeQwen3ForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _for_causal_lm, exist_ok=True)

__all__ = [
    "GrapeConfig",
    "GrapeDynamicLayer",
    "GrapeForCausalLM",
    "GrapeLlamaConfig",
    "GrapeLlamaForCausalLM",
    "GrapeLlamaModel",
    "GrapeModel",
    "GrapeQwen2Config",
    "GrapeQwen2ForCausalLM",
    "GrapeQwen2Model",
    "GrapeQwen3Config",
    "GrapeQwen3ForCausalLM",
    "GrapeQwen3Model",
    "GrapeStaticLayer",
    "adapt",
    "export",
    "load_adapter",
    "new_parameters",
    "save_adapter",
]
