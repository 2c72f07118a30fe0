"""Datasets of existing shards, such as the published ones of FineWeb-Edu."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from ..errors import LabError
from ..files import sha256_of
from .dataset import VERIFY_TOKENS, check_vocabulary
from .manifest import MANIFEST, Manifest, load_manifest
from .shards import Shard, read_shard
from .tokenizer import FOLDER, TextTokenizer, build_tokenizer, load_tokenizer, tokenizer_setting

ADOPTED = "adopted shards"  # source in the manifest
HELD_OUT = re.compile(r"(?:^|_)val(?:_\d+)?\.bin$")


def adopt(directory: str | os.PathLike[str], *, tokenizer: str = "gpt2") -> Path:
    """Write manifest and tokenizer beside the .bin shards of a directory; the shards stay as they are.

    Shards named `..._val_000000.bin` are the validation split; if there is none, the first shard is.
    Every token is read once, for the hashes and to check that it is in the vocabulary.

    Args:
        directory: holds the .bin shards.
        tokenizer: the one the shards were made with.
    """
    directory = Path(directory).expanduser()
    paths = sorted(directory.glob("*.bin"))
    _check(directory, paths)
    if (directory / MANIFEST).exists():
        return _adopted_before(directory, paths, tokenizer)
    if re.fullmatch(r"bpe-\d+", tokenizer):
        raise LabError(
            f"--tokenizer {tokenizer} would be trained, but shards hold tokens; give the tokenizer they were made with"
        )
    words = build_tokenizer(tokenizer, ())
    held_out = {path for path in paths if HELD_OUT.search(path.name)} or {paths[0]}
    shards = [_describe(path, "val" if path in held_out else "train", words) for path in paths]
    if not (directory / FOLDER).is_dir():
        words.save(directory)
    elif load_tokenizer(directory).inner.get_vocab() != words.inner.get_vocab():
        raise LabError(
            f"{directory / FOLDER} is another tokenizer than {tokenizer}; move it away or give it with --tokenizer"
        )
    settings = {"source": ADOPTED, "tokenizer": tokenizer_setting(tokenizer)}
    manifest = Manifest(tokenizer_setting(tokenizer), words.vocab_size, words.eos, settings, tuple(shards))
    manifest.save(directory)
    return directory


def _check(directory: Path, paths: list[Path]) -> None:
    if not directory.is_dir():
        raise LabError(f"there is no directory {directory}; give the one with the .bin shards")
    if len(paths) < 2:
        raise LabError(
            f"{directory} must hold two or more .bin shards, one of them for validation; it has {len(paths)}"
        )
    if all(HELD_OUT.search(path.name) for path in paths):
        raise LabError(f"every shard of {directory} is named as validation; add shards to train on")


def _adopted_before(directory: Path, paths: list[Path], tokenizer: str) -> Path:
    manifest = load_manifest(directory)
    same = {shard.file for shard in manifest.shards} == {path.name for path in paths}
    if not same or manifest.tokenizer != tokenizer_setting(tokenizer):
        raise LabError(
            f"{directory} has a {MANIFEST} already, of {len(manifest.shards)} shards with tokenizer "
            f"{manifest.tokenizer}; delete that file to adopt the shards anew"
        )
    return directory


def _describe(path: Path, split: str, words: TextTokenizer) -> Shard:
    tokens = read_shard(path)
    documents = 0
    for start in range(0, len(tokens), VERIFY_TOKENS):
        block = tokens[start : start + VERIFY_TOKENS]
        check_vocabulary(block, words.vocab_size, path, start)
        documents += int(np.count_nonzero(block == words.eos))
    return Shard(path.name, split, len(tokens), documents, sha256_of(path))
