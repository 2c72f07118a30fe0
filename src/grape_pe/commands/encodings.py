"""`grape encodings [NAME]`: the encodings, their options and laws."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..lab.columns import aligned
from .errors import OK, CommandError
from .parsers import Commands, add_command

EXAMPLE = "grape encodings\n  grape encodings grape-ap"
#: laws do not depend on the size
SHAPE = {"heads": 4, "head_dim": 16, "width": 24}
#: laws and their names in the table
LAWS = {"relative": "relative", "composition": "composes", "streaming": "streams", "non-positive": "bias ≤ 0"}
NAMED = {
    "formula": "formula", "group": "group element", "recovers": "contains", "learned": "learned", "source": "source",
}  # fmt: skip


def add_parsers(commands: Commands) -> None:
    about = (
        "List the encodings with the laws that they satisfy, or describe one: formula, options with their defaults,\n"
        "laws as measured on random tokens, source."
    )
    help = "list the encodings, or describe one"
    parser = add_command(commands, "encodings", run_encodings, help, EXAMPLE, about)
    parser.option("name", "NAME", "one encoding (default: list all)", nargs="?")
    parser.flag("--json")


def run_encodings(options: argparse.Namespace) -> int:
    from ..encodings import names

    found = [described(name) for name in ([options.name] if options.name else names())]
    if options.json:
        print(json.dumps(found[0] if options.name else found, indent=2))
    else:
        print(_one(found[0]) if options.name else _table(found))
    return OK


def described(name: str) -> dict[str, Any]:
    """Facts, options and laws of one encoding, for JSON."""
    from ..encodings import build
    from ..encodings.registry import entry, facts
    from ..testing import law_errors, moved

    try:
        encoding = build(name, **SHAPE)
        options = {key: _plain(value) for key, value in entry(name).options().items()}
    except (TypeError, ValueError) as problem:
        raise CommandError(" ".join(str(problem).split())) from None
    laws, about = law_errors(moved(encoding)), facts(name)
    return {
        "name": name,
        **({} if about is None else {**asdict(about), "law_with": dict(about.law_with)}),
        "options": options,
        "laws": laws.kept(),
        "errors": asdict(laws),
        "breaks_relative_law": encoding.breaks_relative_law,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else repr(value)


def _table(found: list[dict[str, Any]]) -> str:
    rows = [["encoding", *LAWS.values(), "what it does"]]
    for each in found:
        marks = ["yes" if law in each["laws"] else "-" for law in LAWS]
        rows.append([each["name"], *marks, each.get("about", "")])
    hint = "grape encodings NAME shows options and numbers; + combines encodings."
    return f"{aligned(rows, left=len(rows[0]))}\n\n{hint}"


def _one(each: dict[str, Any]) -> str:
    """Lines of a label and a text."""
    errors = each["errors"]
    numbers = f"relative {errors['relative']:.1e}, streaming {errors['streaming']:.1e}"
    if errors["composition"] is not None:
        numbers += f", composition {errors['composition']:.1e} ({errors['composed']})"
    options = [f"{name}={value!r}" for name, value in each["options"].items()]
    labelled = [
        *((label, each.get(key)) for key, label in NAMED.items()),
        *(("" if i else "options", option) for i, option in enumerate(options or ["none"])),
        ("laws kept", ", ".join(each["laws"])),
        ("deviations", numbers),
        ("not relative", each["breaks_relative_law"]),
    ]
    lines = [f"  {label:14} {text}" for label, text in labelled if text]
    return "\n".join([f"{each['name']}: {each.get('about', 'its class has no facts')}", *lines])
