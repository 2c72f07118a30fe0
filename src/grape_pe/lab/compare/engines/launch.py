"""Start a run as a separate process. Uses the standard library alone, as engines send it to other machines."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: prefix of the first line of each attempt's output
ATTEMPT = "=== "
#: seconds for a run to save and end
GRACE = 60.0


def start(
    arguments: Sequence[str], log: Path, directory: str, changes: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`python ARGUMENTS` in `directory`, with its output appended to `log`.

    Ctrl-C in the terminal does not reach it. Its standard input is a pipe that closes when this process ends, which
    ends the run.
    """
    with log.open("a") as output:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        output.write(f"{ATTEMPT}{when} {socket.gethostname()}: python {shlex.join(arguments)}\n")
        output.flush()
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=directory, env={**os.environ, **changes},
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def run(arguments: Sequence[str], log: Path, directory: str, changes: Mapping[str, str]) -> int:
    """Start, wait and return the exit code. An exception, as engines raise to cancel, stops the run."""
    if not log.parent.is_dir() or not os.path.isdir(directory):
        raise FileNotFoundError(
            f"{socket.gethostname()} has no {log.parent} or no {directory}: run grape compare in a directory, and "
            "with an --out, on storage that all machines share under the same path"
        )
    process = start(arguments, log, directory, changes)
    try:
        while process.poll() is None:
            time.sleep(0.2)
        return process.returncode
    except BaseException:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
