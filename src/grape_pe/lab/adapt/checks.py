"""Checks of `grape adapt` before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...extras import require
from ..compare.arms import Arm
from ..errors import LabError
from ..evaluate import benchmarks
from .wishes import Wishes


def check_installed(wishes: Wishes) -> None:
    """Refuse a run whose later steps would lack a package."""
    for module in ("transformers", "tokenizers", "safetensors", "plotly", "filelock", "pydantic"):
        require(module, "lab")
    if wishes.method == "lora":
        require("peft", "adapt")
    if wishes.tasks:
        require("lm_eval", "eval")
        benchmarks.check_tasks(wishes.tasks, data=wishes.task_data or None)


def check_exportable(model: Any) -> None:
    """Refuse --export if the encoding has no stock form."""
    from ...hf.exporter import check_stock_form

    try:
        check_stock_form(model)
    except ValueError as problem:
        raise LabError(f"--export: {problem}") from None


def read_arms(encodings: Sequence[str]) -> list[Arm]:
    try:
        arms = [Arm.parse(each) for each in encodings]
    except ValueError as problem:
        raise LabError(str(problem)) from None
    if not arms or len({arm.label for arm in arms}) < len(arms):
        raise LabError(f"give at least one encoding, each once, got {', '.join(encodings) or 'none'}")
    return arms


def check_root(root: Path, own: Sequence[str], labels: Sequence[str]) -> None:
    """Refuse a directory for a sweep with other files in it."""
    if root.exists() and not root.is_dir():
        raise LabError(f"--out must be a directory, but {root} is a file")
    others = {p.name for p in root.iterdir()} - {*own, *labels} if root.is_dir() else set()
    unknown = [name for name in sorted(others) if not (root / name / "config.yaml").is_file()]
    if unknown:
        raise LabError(
            f"{root} holds {unknown[0]} and is not a sweep; give an empty or new directory as --out"
        )
