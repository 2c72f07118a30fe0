"""manifest.json: what a prepared dataset is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import LabError
from .files import read_json, write_json
from .shards import Shard

FORMAT, FORMAT_VERSION = "grape-pe dataset", 1
MANIFEST, PROGRESS = "manifest.json", "progress.json"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Manifest:
    """The tokenizer, the shards in order, and the settings that made them."""

    tokenizer: str
    vocab_size: int
    eos: int
    settings: dict[str, Any]
    shards: tuple[Shard, ...]

    def of(self, split: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.of(split))

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.of(split))

    def save(self, directory: Path) -> None:
        totals = {
            split: {
                "shards": len(self.of(split)),
                "tokens": self.tokens(split),
                "documents": self.documents(split),
            }
            for split in SPLITS
        }
        said = {"format": FORMAT, "version": FORMAT_VERSION, "totals": totals, **asdict(self)}
        write_json(directory / MANIFEST, said)


def load_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        said = read_json(path)
    except FileNotFoundError:
        raise LabError(_why_none(directory)) from None
    if said.get("format") != FORMAT or said.get("version") != FORMAT_VERSION:
        raise LabError(
            f"{path} must be a {FORMAT!r} of version {FORMAT_VERSION}, got {said.get('format')!r} of version "
            f"{said.get('version')!r}"
        )
    try:
        shards = tuple(Shard(**entry) for entry in said["shards"])
        fields = {name: said[name] for name in ("tokenizer", "vocab_size", "eos", "settings")}
    except (KeyError, TypeError) as error:
        raise LabError(f"{path} is damaged: {error}; prepare the dataset again") from error
    return Manifest(shards=shards, **fields)


def _why_none(directory: Path) -> str:
    if not directory.is_dir():
        return (
            f"there is no dataset at {directory}; make one with: grape data prepare SOURCE --out {directory}"
        )
    if (directory / PROGRESS).exists():
        return f"the dataset in {directory} is not finished; run its `grape data prepare` again to continue"
    return (
        f"{directory} has no {MANIFEST}, so it is no dataset; for a directory of .bin shards run: "
        f"grape data adopt {directory} --tokenizer gpt2"
    )
