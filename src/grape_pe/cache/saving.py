"""Save and load a `StreamingCache`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .layout import Layout
from .sequences import Sequences
from .table import OPTIONAL

if TYPE_CHECKING:
    from .stream import StreamingCache

FORMAT = "grape-pe cache 3"


def saved_state(cache: StreamingCache) -> dict[str, Any]:
    """Copies of all tensors, lengths and settings of a cache."""
    saved = {**_settings(cache), **cache.sequences.saved()}
    for name, table in (("tokens", cache.tokens), ("states", cache.states)):
        saved |= {f"{name}.{n}": t.clone() for n, t in table.stored().items()}
        saved[f"lead.{name}"] = list(table.lead)
    return saved


def load(cache: StreamingCache, saved: Mapping[str, Any]) -> None:
    """Fill an empty cache with a saved one; a ValueError if their settings differ."""
    if saved.get("format") != FORMAT:
        raise ValueError(
            f"not a saved cache of this version: expected format {FORMAT!r}, got {saved.get('format')!r}; "
            "run the tokens again"
        )
    for name, ours in _settings(cache).items():
        if saved.get(name) != ours:
            raise ValueError(
                f"the saved cache has {name}={saved.get(name)}, this cache has {name}={ours}; "
                "load it into a cache with the same settings"
            )
    cache.sequences = Sequences(**{name: copy.deepcopy(saved[name]) for name in cache.sequences.saved()})
    for name, table in (("tokens", cache.tokens), ("states", cache.states)):
        found = {n.removeprefix(f"{name}."): t for n, t in saved.items() if n.startswith(f"{name}.")}
        table.load(found, saved[f"lead.{name}"])
    if cache.sequences.lengths:
        _find_state(cache)


def _settings(cache: StreamingCache) -> dict[str, Any]:
    norm = "" if cache.norm_after is None else ", norm after"
    return {
        "format": FORMAT,
        "encoding": repr(cache.encoding) + norm,
        "window": cache.window,
        "sinks": cache.sinks,
        "rollback": cache.rollback,
        "shift": cache.shift is not None,
    }


def _find_state(cache: StreamingCache) -> None:
    """Set `state_names`; a ValueError if the tables are those of another encoding."""
    code = cache._blank()
    shifted = None if cache.shift is None else (code.k, code.k)
    columns, states, cache.state_names = cache._columns(code, code.k, shifted, Layout())
    for table, names in ((cache.tokens, columns), (cache.states, states)):
        if names.keys() != table.storage.keys() - OPTIONAL:
            raise ValueError(
                f"the saved cache has the tensors {sorted(table.storage)}, expected {sorted(names)}; "
                "load it into a cache of the same encoding"
            )
