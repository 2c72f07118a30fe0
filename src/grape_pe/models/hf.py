"""The Hugging Face model, registered: importing this makes `AutoModelForCausalLM` know it."""

from __future__ import annotations

from .extras import require

require("transformers", "hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from .hf_cache import GrapeDynamicLayer, GrapeStaticLayer  # noqa: E402
from .hf_config import GrapeConfig  # noqa: E402
from .hf_model import GrapeForCausalLM, GrapeModel  # noqa: E402

AutoConfig.register("grape", GrapeConfig, exist_ok=True)
AutoModel.register(GrapeConfig, GrapeModel, exist_ok=True)
AutoModelForCausalLM.register(GrapeConfig, GrapeForCausalLM, exist_ok=True)

__all__ = ["GrapeConfig", "GrapeDynamicLayer", "GrapeForCausalLM", "GrapeModel", "GrapeStaticLayer"]
