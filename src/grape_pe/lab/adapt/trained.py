"""The trained parameters of an adapted model and their optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...extras import require
from ...hf.adapter import adapt, new_parameters
from ..errors import LabError
from .settings import AdaptConfig


def adapted(model: Any, config: AdaptConfig) -> Any:
    """Give the model its encoding in place; initial values depend on the seed alone."""
    section = config.model
    assert isinstance(section.encoding, str)
    name = with_rotation(section.encoding) if config.adapt.fade else section.encoding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            adapt(model, name, shared=section.shared_encoding, **section.encoding_options)
        except (TypeError, ValueError) as problem:
            raise LabError(f"cannot adapt {config.adapt.source}: {problem}") from None
    if config.adapt.method == "new" and not any(p.requires_grad for p in new_parameters(model).values()):
        raise LabError(
            f"{section.encoding} adds no parameter to train; give --lora RANK, --train all, or another encoding"
        )
    return model


def with_rotation(encoding: str) -> str:
    """The initial encoding of a model whose rotation is faded out: rope+fox for fox, rope for nope."""
    return "rope" if encoding == "nope" else f"rope+{encoding}"


def scaled(config: AdaptConfig) -> bool:
    """Whether frequencies are rescaled for a longer context, which changes the logits before training."""
    options = config.model.encoding_options
    return any("scaling" in each for each in (options, *options.values()) if isinstance(each, dict))


def select_trained(model: Any, config: AdaptConfig) -> Any:
    """Set requires_grad. Returns the PEFT model around the model, or None."""
    new = new_parameters(model)
    learnable = {name for name, p in new.items() if p.requires_grad}
    wrapped = None
    if config.adapt.method == "all":
        model.requires_grad_(True)
    elif config.adapt.method == "lora":
        wrapped = _with_lora(model, config)
    for name, parameter in new.items():
        parameter.requires_grad_(name in learnable)
    return wrapped


def _with_lora(model: Any, config: AdaptConfig) -> Any:
    peft = require("peft", "adapt")
    targets = [
        f"{model.base_model_prefix}.{name}"
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear) and "encoding" not in name.split(".")
    ]
    rank = config.adapt.lora
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        )


def optimizer_of(model: Any, config: AdaptConfig) -> torch.optim.AdamW:
    """AdamW with two groups: new parameters at train.lr, the others at adapt.own_lr."""
    new = set(new_parameters(model).values())
    trained = [p for p in model.parameters() if p.requires_grad]
    train, ratio = config.train, config.adapt.own_lr / config.train.lr
    groups = [
        {"params": [p for p in trained if p in new], "share": 1.0},
        {"params": [p for p in trained if p not in new], "share": ratio},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=train.lr, betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay, fused=True,
    )  # fmt: skip
