"""Tiny training runs: the real command line in processes forked from one that has imported the library."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = "The {0} encoding of token {0} turns by {0} and leaves a bias of {0} for the tokens after it. "
TINY = {
    "model.width": 32, "model.layers": 1, "model.heads": 2,
    "data.sequence": 32,
    "train.batch": 4, "train.steps": 12, "train.warmup": 2, "train.eval_every": 4, "train.eval_sequences": 4,
    "train.checkpoint_every": 2, "train.lr": 1e-3, "train.min_lr": 1e-4, "log.tensorboard": False,
}  # fmt: skip
PRELOADED = [
    "grape_pe.lab.train.trainer", "grape_pe.cli", "torch._dynamo", "torch.distributed.tensor",
    "transformers.tokenization_utils_tokenizers",
]  # fmt: skip
LIMIT = 120  # seconds after which a run counts as hanging


def tiny_data(directory: Path, documents: int = 40) -> Path:
    """A prepared dataset of bytes."""
    from grape_pe.lab.data import open_source, prepare

    texts = directory / "texts"
    texts.mkdir()
    for number in range(documents):
        (texts / f"{number:03d}.txt").write_text(TEXT.format(number) * 3)
    return prepare(open_source([str(texts)]), directory / "data", tokenizer="bytes", validation=0.2)


def tiny_config(data: str | Path, **changes: Any) -> Any:
    """A configuration; names are dotted with __, such as train__steps=5."""
    from grape_pe.lab.config import load

    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return load("demo", {**TINY, "data.source": str(data), **dotted})


def words(data: str | Path, out: Path, *more: str, **changes: Any) -> list[str]:
    """The same as arguments of `grape`."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    settings = {**TINY, "data.source": str(data), **dotted}
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["train", "demo", *given, "--out", str(out), "--quiet", *more]


@dataclass
class Running:
    """`grape` under way as one process or several ranks."""

    processes: list[Any]
    said: list[Path]

    def send(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait(self, limit: float = LIMIT) -> tuple[int, str]:
        """The first rank's exit code (negative: killed by that signal) and all that was printed."""
        for process in self.processes:
            process.join(limit)
        hanging = self.alive()
        for process in self.processes:
            process.kill()
            process.join()
        text = "".join(path.read_text() for path in self.said)
        for path in self.said:
            path.unlink()
        assert not hanging, f"still running after {limit} s: {text}"
        return self.processes[0].exitcode, text


def start(arguments: list[str], ranks: int = 1, before: Callable[[], None] | None = None) -> Running:
    """Begin `grape ARGUMENTS` in the background; each rank first calls `before`, a function of a module."""
    port = _free_port() if ranks > 1 else 0
    processes, said = [], []
    for rank in range(ranks):
        handle, name = tempfile.mkstemp(prefix="grape-said-")
        os.close(handle)
        processes.append(_server().Process(target=_work, args=(arguments, rank, ranks, port, name, before)))
        said.append(Path(name))
    for process in processes:
        process.start()
    return Running(processes, said)


def grape(arguments: list[str], ranks: int = 1) -> tuple[int, str]:
    return start(arguments, ranks).wait()


def _server() -> Any:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def _work(
    arguments: list[str], rank: int, ranks: int, port: int, said: str, before: Callable[[], None] | None
) -> None:
    import torch

    from grape_pe.cli import main

    torch.set_num_threads(1)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    if before is not None:
        before()
    sys.exit(main(arguments))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
