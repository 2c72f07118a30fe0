"""Hugging Face: the decoder as a `transformers` model, `adapt` for pretrained models, `export` to stock models.

Importing this module registers the models, so that `AutoModelForCausalLM` can load them.
"""

from __future__ import annotations

from typing import Any

from ..extras import require

require("transformers", "hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from .adapted import CLASSES  # noqa: E402
from .adapter import adapt, new_parameters  # noqa: E402
from .adapter_files import load_adapter, save_adapter  # noqa: E402
from .cache import GrapeDynamicLayer, GrapeStaticLayer  # noqa: E402
from .config import GrapeConfig  # noqa: E402
from .exporter import export  # noqa: E402
from .model import GrapeForCausalLM, GrapeModel  # noqa: E402
from .rotation_fade import RotationFade  # noqa: E402

_own: Any = (GrapeConfig, GrapeModel, GrapeForCausalLM)
for _config, _model, _for_causal_lm in (_own, *CLASSES):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _for_causal_lm, exist_ok=True)

__all__ = [
    "GrapeConfig",
    "GrapeDynamicLayer",
    "GrapeForCausalLM",
    "GrapeModel",
    "GrapeStaticLayer",
    "RotationFade",
    "adapt",
    "export",
    "load_adapter",
    "new_parameters",
    "save_adapter",
]

# GrapeLlamaConfig, GrapeLlamaModel, GrapeLlamaForCausalLM and those of the other families
for _classes in CLASSES:
    for _class in _classes:
        globals()[_class.__name__] = _class
        __all__ += [_class.__name__]
