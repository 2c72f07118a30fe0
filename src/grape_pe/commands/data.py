"""`grape data`: prepare a dataset of tokens, adopt existing shards, look at one, verify one."""

from __future__ import annotations

import argparse
import math
import os
from contextlib import suppress

from .errors import OK
from .parsers import Commands, add_command, positive, real

PREPARE_EXAMPLES = """grape data prepare builtin --tokenizer bpe-2048 --out data/python
  grape data prepare corpus/ more/*.jsonl --field content --tokenizer path/to/tokenizer.json --out data/mine
  grape data prepare fineweb-edu-10B --out data/fineweb-edu-10B --workers 16
If it is killed or the disk is full, run the same command again to continue. --workers does not change the result."""
SOURCES = (
    "builtin (text of the running Python); text, jsonl or parquet files, directories and globs; "
    "hf:NAME (a Hugging Face dataset, streamed); fineweb-edu-10B, fineweb-edu-100B, openwebtext"
)


def add_parsers(commands: Commands) -> None:
    example = "grape data prepare builtin --tokenizer bytes --out data/python"
    data = add_command(commands, "data", None, "prepare and check datasets of tokens", example)
    kinds = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_prepare(kinds)
    _add_adopt(kinds)
    for name, run, about in (
        ("info", lambda options: _show(options.directory), "show the tokens and settings of a dataset"),
        ("verify", _verify, "check each shard's length, hash and tokens"),
    ):
        parser = add_command(kinds, name, run, about, f"grape data {name} data/python")
        parser.option("directory", "DIR", "a prepared dataset")


def _add_prepare(kinds: Commands) -> None:
    about = "turn text into shards of tokens with a manifest"
    parser = add_command(kinds, "prepare", _prepare, about, PREPARE_EXAMPLES)
    add = parser.option
    add("source", "SOURCE", SOURCES, nargs="+")
    add("--out", "DIR", "directory of the dataset: new, empty, or one to continue", required=True)
    about = "gpt2, bytes, bpe-N (trained on the data), or a path (default: bpe-8192; of named sources, gpt2)"
    add("--tokenizer", "NAME", about)
    add("--part", "I/N", "prepare part I of N, for several machines (default: 1/1)", (0, 1), part)
    add("--field", "NAME", "field or column with the text", "text")
    add("--config", "NAME", "configuration of a Hugging Face dataset")
    add("--split", "NAME", "split of a Hugging Face dataset", "train")
    add("--shard-tokens", "N", "tokens per shard (default: 1e8)", 10**8, count)
    add("--max-tokens", "N", "stop after this many tokens, such as 1e9", type=count)
    add("--validation", "SHARE", "share held out for validation", 0.005, real)
    add("--workers", "N", "processes (default: all cores)", os.cpu_count() or 1, positive)


def _add_adopt(kinds: Commands) -> None:
    about = "write a manifest beside .bin shards that exist already"
    parser = add_command(kinds, "adopt", _adopt, about, "grape data adopt fineweb/ --tokenizer gpt2")
    about = "where the .bin files are; ..._val_000000.bin is for validation"
    parser.option("directory", "DIR", about)
    parser.option("--tokenizer", "NAME", "tokenizer of the shards: gpt2, bytes or a path", "gpt2")


def part(text: str) -> tuple[int, int]:
    """2/16 as (1, 16)."""
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise ValueError("must be I/N with I from 1 to N, such as 2/16")
    return int(number) - 1, int(parts)


def count(text: str) -> int:
    """A whole number, also as 1e9."""
    with suppress(ValueError):
        if 1 <= (value := float(text)) < math.inf and value == int(value):
            return int(value)
    raise ValueError("must be a whole number of at least 1, such as 1000 or 1e9")


def _prepare(options: argparse.Namespace) -> int:
    from ..lab.data import default_tokenizer, open_source, prepare

    source = open_source(
        options.source, field=options.field, config=options.config, split=options.split, part=options.part
    )
    prepare(
        source, options.out, tokenizer=options.tokenizer or default_tokenizer(options.source),
        shard_tokens=options.shard_tokens, validation=options.validation, max_tokens=options.max_tokens,
        workers=options.workers, show_progress=True,
    )  # fmt: skip
    return _show(options.out)


def _adopt(options: argparse.Namespace) -> int:
    from ..lab.data import adopt

    return _show(adopt(options.directory, tokenizer=options.tokenizer))


def _show(directory: str | os.PathLike[str]) -> int:
    from ..lab.data import open_dataset

    manifest = open_dataset(directory).manifest
    print(
        f"{directory}: tokenizer {manifest.tokenizer}, vocabulary {manifest.vocab_size:,}, end {manifest.eos}"
    )
    for split in ("train", "val"):
        shards = len(manifest.of(split))
        print(
            f"  {split:5} {manifest.tokens(split):>16,} tokens  {manifest.documents(split):>12,} documents  "
            f"{shards:>5,} shard{'' if shards == 1 else 's'}"
        )
    for name, value in manifest.settings.items():
        print(f"  {name}: {value}")
    return OK


def _verify(options: argparse.Namespace) -> int:
    from ..lab.data import verify
    from ..lab.errors import LabError

    found = 0
    for shard, problem in verify(options.directory):
        print(f"{shard.file}  {problem or 'good'}")
        found += problem is not None
    if found:
        raise LabError(
            f"{found} bad shard{'' if found == 1 else 's'} in {options.directory}; "
            "copy them again or prepare the dataset again"
        )
    return OK
