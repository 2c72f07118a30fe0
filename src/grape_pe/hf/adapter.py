"""Give a pretrained model another encoding, without a change of its logits before it is trained.

adapt(model, "rope+grape-ap")         # then train; only the new parameters by default
model.save_pretrained("adapted")      # AutoModelForCausalLM.from_pretrained("adapted") loads it
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checks import check_choice
from ..encodings import Encoding
from .adapted import FAMILIES, AdaptedForCausalLM, build_encodings, change_class, install


def adapt(
    model: PreTrainedModel,
    encoding: str,
    *,
    shared: bool = False,
    train: Literal["new", "all"] = "new",
    **options: Any,
) -> PreTrainedModel:
    """Replace the encoding of a pretrained model, in place. Its logits do not change before it is trained.

    Rotations start at the model's own frequencies. Biases start at amplitude 0: they then have no effect, but their
    amplitude gets a gradient. The model becomes a `GrapeLlamaForCausalLM` (or one of another family), with its own
    configuration, for `save_pretrained` and `from_pretrained`.

    Args:
        model: a stock model for causal language modeling, of a family in `docs/huggingface.md`.
        encoding: the new encoding, such as "grape-m", "rope+fox" or "grape-m+grape-ap".
        shared: whether all layers share one encoding.
        train: "new" freezes all parameters of the stock model; "all" does not.
        options: options of the encoding, as for `grape.build`. `scaling` changes the model's frequencies for a longer
            context, and so its logits; its `original_context` is the model's context by default.

    Returns:
        The same model.

    Raises:
        TypeError: if the model is not of a supported family.
        ValueError: if the encoding would change the logits.
    """
    family = _family(model)
    check_choice("train", train, ("new", "all"))
    config = family.config_class.from_stock(model.config, encoding, options, shared)  # type: ignore[union-attr]
    base: Any = model.base_model
    encodings = build_encodings(base, config)
    for i, built in enumerate(encodings):
        built.to(next(base.layers[i].parameters()).device, model.dtype)
    _try(encodings[0], next(base.layers[0].parameters()).device, model.dtype)
    if train == "new":
        model.requires_grad_(False)
    _replace_config(model, config)
    model._weight_conversions = None  # type: ignore[assignment]  # of the stock checkpoint's names, which we do not use
    change_class(model, family)
    change_class(base, family.base)
    install(base, encodings)
    return model


@torch.no_grad()
def _try(encoding: Encoding, device: torch.device, dtype: torch.dtype) -> None:
    """Encode two tokens, so that a bias that cannot start at zero raises its error before the model is changed."""
    shape = encoding.shape
    q = torch.zeros(1, shape.heads, 2, shape.head_dim, device=device, dtype=dtype)
    k = q[:, : shape.kv_heads]
    x = None if shape.width is None else q.new_zeros(1, 2, shape.width)
    encoding(q, k, x=x, v=k)


def _family(model: PreTrainedModel) -> type[AdaptedForCausalLM]:
    if isinstance(model, AdaptedForCausalLM):
        raise ValueError(f"this model already has {model.config.encoding!r}; load the original again")
    if type(model) not in FAMILIES:
        known = ", ".join(cls.__name__ for cls in FAMILIES)
        raise TypeError(
            f"adapt takes {known}, got {type(model).__name__}; adapt a model before PEFT or torch.compile wrap it"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "some parameters are on the meta device (offloaded or not loaded); load the model first"
        )
    return FAMILIES[type(model)]


def _replace_config(model: PreTrainedModel, config: Any) -> None:
    """Set the configuration of every module that has the old one, without a change of the old one.

    The model's name is removed, because PEFT and others would load the stock model by it.
    """
    old = model.config
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = config  # type: ignore[assignment]
    config._attn_implementation = model._check_and_adjust_attn_implementation("grape")
    model.name_or_path = ""


def adapted_config(model: PreTrainedModel) -> Any:
    """The configuration of an adapted model; a ValueError for other models."""
    if not isinstance(model, AdaptedForCausalLM):
        raise ValueError(f"this {type(model).__name__} has not been adapted; call adapt(model, …) first")
    return model.config  # type: ignore[no-any-return]


def new_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that `adapt` added, by name.

    Args:
        model: a model changed by `adapt`.

    Returns:
        A dict of parameters.
    """
    added = set(new_state(model))
    return {name: p for name, p in model.named_parameters() if name in added}


def new_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters and buffers that `adapt` added, by name."""
    adapted_config(model)
    ours = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Encoding))
    return {name: t for name, t in model.state_dict().items() if name.startswith(ours)}
