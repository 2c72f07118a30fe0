"""`RotationFade`: reduce the rotation of an adapted model to zero during training, until only biases are left.

model = adapt(model, "rope+fox", train="all")
fade = RotationFade(model, steps=1000)
for batch in batches:
    …                                   # forward, backward, optimizer.step()
    fade.step()                         # theta -> (1 - step / 1000) theta
model.save_pretrained("additive")       # encoding "fox", without a rotation
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checks import check_integer
from ..encodings import Encoding
from ..encodings.registry import ENTRIES
from ..encodings.rotary import Rotary
from .adapted import AdaptedForCausalLM, set_encodings
from .adapted_config import ROTATIONS
from .fade import without_rotation


class RotationFade:
    """Multiplies the frequencies of all layers by a strength that decreases from 1 to 0 in equal steps.

    At 0 the rotation is removed: "rope+fox" becomes "fox", and "rope" becomes "nope" (DroPE). The strength is saved
    with the model, in `model.config.rotation`; after loading, `RotationFade(model, steps)` with the same `steps`
    continues. Use a new KV cache after a step, because cached keys have the old frequencies.

    Args:
        model: a model changed by `adapt`, or a PEFT model of one.
        steps: number of calls of `step` from strength 1 to 0.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        check_integer("steps", steps)
        self.model = _adapted(model)
        self.steps = steps
        self.done = round((1.0 - self.strength) * steps)
        self._check()

    @property
    def strength(self) -> float:
        """The factor of the frequencies: 1 at first, 0 at the end."""
        return float(self.model.config.rotation)

    @property
    def finished(self) -> bool:
        """Whether the strength is 0."""
        return self.strength == 0.0

    def step(self) -> float:
        """Reduce the strength by one step and return it. After the last step further calls have no effect."""
        if self.finished:
            return 0.0
        if self.set(self.done + 1) == 0.0:
            self.take_out()
        return self.strength

    def set(self, done: int) -> float:
        """Set and return the strength after `done` steps, to resume a run. Does not remove the rotation at 0."""
        self.done = done
        self.model.config.rotation = strength = max(0.0, 1.0 - done / self.steps)
        for part in self.model.modules():
            if isinstance(part, Rotary):
                part.frequencies.strength = strength
        return strength

    def _check(self) -> None:
        base = self.model.base_model
        if any(isinstance(part, Rotary) and part.query_factor != 1.0 for part in self.model.modules()):
            raise ValueError(
                "a rotation with YaRN's attention factor cannot be faded out, because the logits would jump at the "
                "end; adapt without scaling, or set attention_factor to 1.0"
            )
        for i in range(len(base.layers)):
            if not isinstance(base.encoding_of(i), Encoding):
                raise TypeError(
                    f"the encoding of layer {i} is wrapped in a {type(base.encoding_of(i)).__name__} "
                    "(modules_to_save of PEFT); train the encoding itself: leave it out of modules_to_save and set "
                    "requires_grad on new_parameters(model)"
                )

    def take_out(self) -> None:
        """Remove the rotation from encodings and configuration, at strength 0. Only needed after `set`."""
        if not self.finished:
            raise ValueError(
                f"the rotation can be removed at strength 0, got {self.strength:g}; call step() or set({self.steps})"
            )
        config, base = self.model.config, self.model.base_model
        left = [part for part in config.encoding.split("+") if part not in ROTATIONS]
        count = 1 if config.shared_encoding else len(base.layers)
        encodings = [without_rotation(base.encoding_of(i)) for i in range(count)]
        config.encoding_options = _options_of(left, config.encoding_options or {})
        config.encoding = "+".join(left) or "nope"
        set_encodings(base, encodings)


def _options_of(left: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The options of the remaining parts."""
    known = {name for part in left for name in ENTRIES[part].options()}
    return {name: value for name, value in options.items() if name in left or name in known}


def _adapted(model: nn.Module) -> Any:
    found = next((part for part in model.modules() if isinstance(part, AdaptedForCausalLM)), None)
    if found is None:
        raise TypeError(
            f"RotationFade takes a model changed by adapt, got {type(model).__name__}; "
            'call adapt(model, "rope+fox") first'
        )
    return found
