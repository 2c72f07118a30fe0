"""Save and load only the tensors that `adapt` added to a model, as safetensors."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .adapter import adapt, adapted_config, new_state

FORMAT = "grape-pe adapter 1"


def save_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> Path:
    """Save the tensors that `adapt` added, without those of the stock model. The file is replaced atomically.

    Args:
        model: a model changed by `adapt`.
        path: the safetensors file to write.

    Returns:
        The path.
    """
    config, path = adapted_config(model), Path(path)
    metadata = {
        "format": FORMAT,
        "encoding": config.encoding,
        "options": json.dumps(config.encoding_options),
        "shared": json.dumps(config.shared_encoding),
        "model_type": config.family.config.model_type,
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in new_state(model).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, scratch, metadata)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


def load_adapter(
    model: PreTrainedModel, path: str | os.PathLike[str], *, train: Literal["new", "all"] = "new"
) -> PreTrainedModel:
    """Adapt a stock model and load the tensors of an adapter.

    Args:
        model: the stock model that was adapted, loaded again.
        path: a file written by `save_adapter`.
        train: "new" freezes all parameters of the stock model; "all" does not.

    Returns:
        The same model, adapted.
    """
    metadata, tensors = _read(Path(path))
    if metadata["model_type"] != model.config.model_type:
        raise ValueError(
            f"the adapter is for a {metadata['model_type']} model, got {model.config.model_type}; "
            "load the pretrained model that was adapted"
        )
    options, shared = json.loads(metadata["options"]), json.loads(metadata["shared"])
    adapt(model, metadata["encoding"], shared=shared, train=train, **options)
    expected = new_state(model)
    wrong = sorted(expected.keys() ^ tensors.keys()) or sorted(
        name for name in expected if expected[name].shape != tensors[name].shape
    )
    if wrong:
        raise ValueError(
            f"the adapter does not fit this model: {wrong[0]!r} is missing, unexpected or of another shape; "
            "load the pretrained model that was adapted"
        )
    model.load_state_dict(tensors, strict=False)
    return model


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no adapter file at {path}; pass the file written by save_adapter")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file ({error}); pickles are not supported, because they can run code"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not an adapter: expected format {FORMAT!r}, got {metadata.get('format')!r}; "
            "pass a file written by save_adapter"
        )
    return metadata, tensors
