"""A comparison as one text file: its settings and the measurements of finished runs, without weights.

    write_archive(Path("results/small"), Path("small.jsonl"))
    restore(Path("small.jsonl"), Path("elsewhere/small"), comparison, Resources(threads=1, gpus=0))

`grape report` reads the file; `grape compare --from` continues from it: its runs count as done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..files import damaged, read_json, read_json_lines, write_json, write_text
from ..train.run_directory import ENVIRONMENT, surroundings
from .comparison import (
    AGAIN,
    COMPARISON,
    EVALUATION,
    RESTORE,
    Begun,
    Comparison,
    jobs,
    join_directory,
    joined,
    read_described,
    trials,
)
from .engines.engine import Resources

#: the kind of a run, by its directory
KINDS = {"sweep": "trial", "runs": "language", "tasks": "task"}
REWRITE = "write it again: grape report DIR --jsonl FILE"


def write_archive(root: Path, out: Path) -> Path:
    """Write the finished runs of the comparison in `root`: a line of settings, then a line per run.

    Args:
        root: a directory of `compare`.
        out: the .jsonl file.
    """
    if not (root / COMPARISON).is_file():
        raise LabError(f"--jsonl takes one directory of grape compare; there is no {root / COMPARISON}")
    found = [
        path for path in sorted(root.glob(f"*/**/{EVALUATION}")) if path.relative_to(root).parts[0] in KINDS
    ]
    about = {"data": _data(found), **read_json(root / COMPARISON, RESTORE)}
    lines = [{"kind": "comparison", **about}]
    for path in found:
        place = path.parent.relative_to(root)
        lines.append({"kind": KINDS[place.parts[0]], "run": place.as_posix(), **read_json(path, AGAIN)})
    write_text(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return out


def _data(found: list[Path]) -> dict[str, Any] | None:
    """The data of the runs on text, for a comparison that did not store it."""
    for path in found:
        place = path.with_name(ENVIRONMENT)
        data = read_json(place, RESTORE).get("data") if place.is_file() else None
        if isinstance(data, dict) and "manifest" in data:
            return data
    return None


def restore(archive: Path, root: Path, comparison: Comparison, resources: Resources) -> None:
    """Add the runs of a file to a directory that lacks them; refuses other settings."""
    about, runs = _read(archive)
    before = read_described(about, archive, REWRITE)
    wanted = joined(archive, before, comparison, resources)
    allowed = {job.name for each in (trials, jobs) for job in each(wanted)}
    for run in runs:
        if run.get("run") not in allowed:
            raise damaged(archive, f"{run.get('run')!r} is not a run of this comparison", REWRITE)
    if (root / COMPARISON).exists():
        join_directory(root, before.comparison, resources)
    else:
        write_json(root / COMPARISON, {**about, **surroundings(), "elsewhere": _elsewhere(about)})
    for run in runs:
        place = root / run["run"] / EVALUATION
        if not place.exists():
            write_json(place, {name: value for name, value in run.items() if name not in ("kind", "run")})


def archived(archive: Path) -> Begun:
    """The comparison in a file."""
    return read_described(_read(archive)[0], archive, REWRITE)


def _read(archive: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not archive.is_file():
        raise LabError(f"there is no file {archive}; grape report DIR --jsonl {archive} writes one")
    first, *rest = read_json_lines(archive, REWRITE) or [{}]
    if first.pop("kind", None) != "comparison" or "comparison" not in first:
        raise LabError(f"{archive} has no settings of a comparison; {REWRITE}")
    return first, rest


def _elsewhere(about: dict[str, Any]) -> list[dict[str, Any]]:
    """Other machines and versions of its runs."""
    there = {name: about.get(name) for name in ("machine", "versions")}
    here = {name: surroundings()[name] for name in there}
    return [*about.get("elsewhere", []), *([] if there == here else [there])]
