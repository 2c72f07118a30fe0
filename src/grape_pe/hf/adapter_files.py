"""Saving adapted models: a small adapter file, or a directory with everything. Safetensors only."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .adapter import adapt, adapter_of, new_state

FORMAT = "grape-pe adapter 1"
ADAPTER_FILE = "grape_adapter.safetensors"
#: not config.json, so that nothing loads the weights without the encoding they were trained with
CONFIG_FILE = "base_config.json"


def save_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> Path:
    """Write what `adapt` added, and nothing else; all of the file or none of it."""
    info, path = adapter_of(model), Path(path)
    said = {
        "format": FORMAT,
        "encoding": info.encoding,
        "options": json.dumps(dict(info.options)),
        "shared": json.dumps(info.shared),
        "model_type": model.config.model_type,
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in new_state(model).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, scratch, said)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


def load_adapter(
    model: PreTrainedModel, path: str | os.PathLike[str], *, train: Literal["new", "all"] = "new"
) -> PreTrainedModel:
    """`adapt` a freshly loaded base model as saved, and fill in what was learned."""
    said, tensors = _read(Path(path))
    if said["model_type"] != model.config.model_type:
        raise ValueError(
            f"the adapter was made for a {said['model_type']} model, this is {model.config.model_type}"
        )
    adapt(
        model, said["encoding"], shared=json.loads(said["shared"]), train=train, **json.loads(said["options"])
    )
    held = new_state(model)
    wrong = sorted(held.keys() ^ tensors.keys()) or sorted(
        name for name in held if held[name].shape != tensors[name].shape
    )
    if wrong:
        raise ValueError(f"the adapter does not fit this model: {wrong[0]!r} is missing or of another shape")
    model.load_state_dict(tensors, strict=False)
    return model


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no adapter file at {path}; save_adapter writes one")
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file ({error}); pickles are not read, because they can run code"
        ) from error
    if said.get("format") != FORMAT:
        raise ValueError(f"{path} is no adapter: expected format {FORMAT!r}, got {said.get('format')!r}")
    return said, tensors


def save_adapted(model: PreTrainedModel, directory: str | os.PathLike[str]) -> Path:
    """Write the whole adapted model: all weights, the base configuration and the adapter."""
    added, directory = new_state(model), Path(directory)
    base = {name: t for name, t in model.state_dict().items() if name not in added}
    model.save_pretrained(directory, state_dict=base)
    os.replace(directory / "config.json", directory / CONFIG_FILE)
    save_adapter(model, directory / ADAPTER_FILE)
    return directory


def load_adapted(directory: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """The model `save_adapted` wrote; `kwargs` go to transformers' from_pretrained."""
    directory = Path(directory)
    if not (directory / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{directory} has no {CONFIG_FILE}; save_adapted writes such a directory")
    said = json.loads((directory / CONFIG_FILE).read_text())
    config = CONFIG_MAPPING[said["model_type"]].from_dict(said)
    kwargs = {**kwargs, "use_safetensors": True, "weights_only": True}
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, **kwargs)
    return load_adapter(model, directory / ADAPTER_FILE, train="all")
