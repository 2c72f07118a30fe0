"""The same documents as every kind of source, and looking at what was made of them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grape_pe.lab.data import open_dataset, read_shard

TEXTS = [f"Document {n}: " + "so many words, " * (n % 7) for n in range(60)]
OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "shard_tokens": 500, "validation": 0.1}


def text_files(path: Path) -> str:
    (path / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS[:25]))
    (path / "b.md").write_text("\n<|endoftext|>\n".join(TEXTS[25:]))
    return str(path)


def jsonl_files(path: Path) -> str:
    for name, part in (("a", TEXTS[:25]), ("b", TEXTS[25:])):
        lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(part)]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    return str(path / "*.jsonl")


def parquet_file(path: Path) -> str:
    pq.write_table(pa.table({"n": range(60), "text": TEXTS}), path / "a.parquet", row_group_size=7)
    return str(path / "a.parquet")


def hub_directory(path: Path) -> str:
    jsonl_files(path)
    return f"hf:{path}"


KINDS = [text_files, jsonl_files, parquet_file, hub_directory]


def files_of(directory: Path) -> dict[str, bytes]:
    """Everything in a dataset but the lock."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def documents_of(out: Path, split: str) -> list[list[int]]:
    dataset = open_dataset(out)
    stream = np.concatenate([read_shard(out / shard.file) for shard in dataset.manifest.of(split)])
    starts = np.flatnonzero(stream == dataset.eos)
    assert starts[0] == 0
    return [part[1:].tolist() for part in np.split(stream, starts[1:])]


def in_a_child(function: Callable[..., None], *arguments: Any) -> int:
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode
