"""manifest.json: the tokenizer, shards and settings of a prepared dataset."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..files import damaged, read_json, typed, write_json
from .shards import Shard

FORMAT, FORMAT_VERSION = "grape-pe dataset", 1
MANIFEST, PROGRESS = "manifest.json", "progress.json"
SPLITS = ("train", "val")
AGAIN = "prepare the dataset again in a new directory"


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
        counts = {
            "shards": lambda split: len(self.of(split)),
            "tokens": self.tokens,
            "documents": self.documents,
        }
        totals = {split: {name: count(split) for name, count in counts.items()} for split in SPLITS}
        content = {"format": FORMAT, "version": FORMAT_VERSION, "totals": totals, **asdict(self)}
        write_json(directory / MANIFEST, content)


def load_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        content = read_json(path, AGAIN)
    except FileNotFoundError:
        raise LabError(_why_none(directory)) from None
    if "format" not in content:
        raise damaged(path, "it has no format", AGAIN)
    if content.get("format") != FORMAT or content.get("version") != FORMAT_VERSION:
        raise LabError(
            f"{path} must be a {FORMAT!r} of version {FORMAT_VERSION}, got {content.get('format')!r} of version "
            f"{content.get('version')!r}"
        )
    return typed(Manifest, content, path, AGAIN)


def _why_none(directory: Path) -> str:
    if not directory.is_dir():
        return (
            f"there is no dataset at {directory}; make one with: grape data prepare SOURCE --out {directory}"
        )
    if (directory / PROGRESS).exists():
        return f"the dataset in {directory} is not finished; run its `grape data prepare` again to continue"
    return (
        f"{directory} has no {MANIFEST}, so it is not a dataset; for a directory of .bin shards run: "
        f"grape data adopt {directory} --tokenizer gpt2"
    )
