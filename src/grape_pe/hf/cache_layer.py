"""What our layers of a Hugging Face cache have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import LAYER_TYPE


class GrapeCacheLayer:
    """Filled by the model itself: keys and values alone would lack the bias tensors and states."""

    _layer_type = LAYER_TYPE
    supports_early_init = False

    # for code that looks at keys and values; transformers' own layers set them to None when built
    keys = property(lambda self: self.stored("k"), lambda self, value: None)
    values = property(lambda self: self.stored("v"), lambda self, value: None)

    def stored(self, name: str) -> Tensor | None:
        """The cached keys ("k") or values ("v"); None if there are none."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a grape cache layer is filled by the model itself, not from keys and values alone")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a grape cache layer also keeps bias tensors and states: keys and values alone cannot be added; "
            "pass this cache to a grape model"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)
