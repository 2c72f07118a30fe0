"""`grape data`: prepare a dataset of tokens, adopt existing shards, look at one, verify one."""

from __future__ import annotations

import argparse
import os

from .parsers import Commands, add_command

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
        ("info", _info, "show the tokens and settings of a dataset"),
        ("verify", _verify, "check each shard's length, hash and tokens"),
    ):
        parser = add_command(kinds, name, run, about, f"grape data {name} data/python")
        parser.add_argument("directory", metavar="DIR", help="a prepared dataset")


def _add_prepare(kinds: Commands) -> None:
    about = "turn text into shards of tokens with a manifest"
    parser = add_command(kinds, "prepare", _prepare, about, PREPARE_EXAMPLES)
    parser.add_argument("source", nargs="+", metavar="SOURCE", help=SOURCES)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the dataset: new, empty, or one to continue"
    )
    parser.add_argument(
        "--tokenizer",
        help="gpt2, bytes, bpe-N (trained on the data), or a path (default: bpe-8192; of named sources, gpt2)",
    )
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N",
                        help="prepare part I of N (from 1), for several machines")  # fmt: skip
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="field or column with the text (default: text)"
    )
    parser.add_argument("--config", metavar="NAME", help="configuration of a Hugging Face dataset")
    parser.add_argument(
        "--split", default="train", metavar="NAME", help="split of a Hugging Face dataset (default: train)"
    )
    parser.add_argument(
        "--shard-tokens", type=_count, default=10**8, metavar="N", help="tokens per shard (default: 1e8)"
    )
    parser.add_argument(
        "--max-tokens", type=_count, metavar="N", help="stop after this many tokens, such as 1e9"
    )
    parser.add_argument(
        "--validation", type=float, default=0.005, metavar="SHARE", help="validation share (default: 0.005)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", default=os.cpu_count() or 1, help="processes (default: all cores)"
    )


def _add_adopt(kinds: Commands) -> None:
    about = "write a manifest beside .bin shards that exist already"
    parser = add_command(kinds, "adopt", _adopt, about, "grape data adopt fineweb/ --tokenizer gpt2")
    parser.add_argument(
        "directory", metavar="DIR", help="where the .bin files are; ..._val_000000.bin is for validation"
    )
    parser.add_argument(
        "--tokenizer", default="gpt2", help="tokenizer of the shards: gpt2, bytes or a path (default: gpt2)"
    )


def _part(text: str) -> tuple[int, int]:
    """2/16 as (1, 16)."""
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, such as 2/16, got {text}")
    return int(number) - 1, int(parts)


def _count(text: str) -> int:
    """A whole number, also as 1e9."""
    try:
        whole = int(float(text))
    except (ValueError, OverflowError):
        whole = 0
    if whole < 1 or whole != float(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return whole


def _prepare(options: argparse.Namespace) -> int:
    from ..lab.data import default_tokenizer, open_source, prepare

    source = open_source(
        options.source, field=options.field, config=options.config, split=options.split, part=options.part
    )
    prepare(
        source,
        options.out,
        tokenizer=options.tokenizer or default_tokenizer(options.source),
        shard_tokens=options.shard_tokens,
        validation=options.validation,
        max_tokens=options.max_tokens,
        workers=options.workers,
        show_progress=True,
    )
    return _show(options.out)


def _adopt(options: argparse.Namespace) -> int:
    from ..lab.data import adopt

    return _show(adopt(options.directory, tokenizer=options.tokenizer))


def _info(options: argparse.Namespace) -> int:
    return _show(options.directory)


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
    return 0


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
    return 0
