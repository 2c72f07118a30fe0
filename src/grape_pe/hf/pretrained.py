"""`GrapePretrained`, the base class of all our transformers models: loading, saving and initialization."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..encodings import Encoding
from ..encodings.base import FullPrecision
from ..layers import KVShift
from ..models.absolute import AbsolutePositions
from ..models.blocks import Block
from ..models.remote_code import REMOTE_CODE, REMOTE_FILE, auto_map


class GrapePretrained(PreTrainedModel):
    """Loads safetensors only, checks that checkpoints fit, and saves the file that `trust_remote_code` needs."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False  # other attention implementations would ignore the bias
    _can_compile_fullgraph = True

    @staticmethod
    def create_masks_for_generate(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """The mask of the new tokens only, whose shape is the same in every step, for static caches."""
        if attention_mask is None:
            return torch.ones(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        return attention_mask[:, -inputs_embeds.shape[1] :]

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Not as custom code, because transformers would skip modules without their own parameters."""
        super()._initialize_weights(module, False)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as in transformers, but from safetensors only; a ValueError if tensors are missing."""
        if kwargs.pop("use_safetensors", True) is False or kwargs.pop("weights_only", True) is False:
            raise ValueError(
                "grape models are loaded from safetensors only, because pickles can run code; leave use_safetensors "
                "and weights_only out"
            )
        if "config" not in kwargs and args:
            _check_model_type(cls, *args[:1], **kwargs)
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(
            *args, use_safetensors=True, weights_only=True, output_loading_info=True, **kwargs
        )
        model, info = loaded
        _check_tensors(model, info)
        _check_offloading(model)
        return (model, info) if with_info else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as in transformers, with a small file through which the Hub loads the model with this package."""
        self.config.auto_map = auto_map(type(self.config).__name__.removesuffix("Config"))
        if kwargs.get("is_main_process", True):  # before super(), which may upload the directory
            os.makedirs(save_directory, exist_ok=True)
            Path(save_directory, REMOTE_FILE).write_text(REMOTE_CODE)
        super().save_pretrained(save_directory, *args, **kwargs)


def _check_model_type(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> None:
    expected = cls.config_class
    assert expected is not None
    found, _ = expected.get_config_dict(*args, **kwargs)
    if found["model_type"] != expected.model_type:
        raise ValueError(
            f"{cls.__name__} loads models of type {expected.model_type}, got {found['model_type']} in {args[0]}; "
            "load it with AutoModelForCausalLM, and give stock models another encoding with grape_pe.hf.adapt"
        )


def _check_tensors(model: Any, info: dict[str, Any]) -> None:
    """Raise a ValueError for a checkpoint with missing tensors, or with tensors of another encoding."""
    missing = sorted(info["missing_keys"])
    foreign = sorted(name for name in info["unexpected_keys"] if "encoding" in name.split("."))
    if missing or foreign:
        what = (
            f"lacks {len(missing)} tensors" if missing else f"has {len(foreign)} tensors of another encoding"
        )
        raise ValueError(
            f"this is not a checkpoint of a {model.config.model_type} model with encoding "
            f"{model.config.encoding!r}: it {what}, first {(missing or foreign)[0]!r}; "
            "check the directory, and `encoding` in its config.json"
        )


def _check_offloading(model: nn.Module) -> None:
    """Raise a ValueError for offloaded tensors, which accelerate only loads in `forward` of a module."""
    devices = {p.device.type for p in model.parameters()}
    if "meta" in devices and len(devices) > 1:
        raise ValueError(
            'device_map offloads layers to "cpu" or "disk", which grape models do not support; use a device_map '
            "without offloading, or none"
        )


def reset_missing(module: Block | Encoding | KVShift | AbsolutePositions) -> None:
    """Call `reset_parameters`, but keep the tensors that a checkpoint has filled."""
    tensors = [*module.parameters(), *module.buffers()]
    loaded = [t for t in tensors if getattr(t, "_is_hf_initialized", False)]  # set by transformers
    if len(loaded) == len(tensors):
        return
    kept = [t.detach().clone() for t in loaded]
    module.reset_parameters()
    for tensor, value in zip(loaded, kept, strict=True):
        tensor.copy_(value)


def full_precision_names(model: nn.Module) -> list[str]:
    """Names of tensors that transformers must not load in bfloat16 or float16, such as frequencies and slopes."""
    return [
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, FullPrecision)
        for name in [*module._parameters, *module._buffers]
    ]
