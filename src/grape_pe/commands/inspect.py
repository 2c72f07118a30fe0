"""`grape inspect CHECKPOINT|NAME`: the diagnostics of one encoding."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..extras import require
from ..lab.columns import aligned
from .errors import OK, CommandError
from .parsers import Commands, add_command, positive

if TYPE_CHECKING:
    from ..lab.inspect.inspection import Histogram, Inspection, LayerInspection

EXAMPLE = (
    "grape inspect grape-ap --heads 4 --head-dim 32\n  grape inspect 'fox[forget_bias=4]'\n"
    "  grape inspect runs/x --layer 2 --html picture.html"
)
BARS = " ▁▂▃▄▅▆▇█"
HEADS = 16
HISTOGRAMS = 8


def add_parsers(commands: Commands) -> None:
    about = (
        "Show one layer of a trained model, or an encoding by name at its initial state: spectrum, reach of\n"
        "each head, gates, the relative law, and the singular values of the action, in closed form beside\n"
        "those of the explicit matrix. Options of an encoding go in brackets. --html writes its picture as a page."
    )
    parser = add_command(commands, "inspect", run_inspect, "diagnose an encoding", EXAMPLE, about)
    parser.option("what", "CHECKPOINT|NAME", "a run, a saved model, or the name of an encoding")
    parser.option("--layer", "N", "layer to show", 1, positive)
    parser.option("--heads", "N", "for NAME: number of heads", 8, positive)
    parser.option("--head-dim", "N", "for NAME: features per head", 64, positive)
    parser.option("--html", "FILE", "write the picture as a page", type=Path)
    parser.flag("--json")


def run_inspect(options: argparse.Namespace) -> int:
    require("pydantic", "lab")
    from ..lab.inspect.inspection import inspect

    found = inspect(options.what, options.heads, options.head_dim)
    if options.layer > len(found.layers):
        raise CommandError(f"--layer must be from 1 to {len(found.layers)}, got {options.layer}")
    if options.html:
        from ..lab.report.page import picture_page, write_page

        write_page(picture_page(found.encoding, found.picture), options.html)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
        return OK
    print("\n".join(show(found, found.layers[options.layer - 1])))
    if options.html:
        print(f"Picture: {options.html}")
    return OK


def show(found: Inspection, layer: LayerInspection) -> Iterator[str]:
    """Lines about one layer."""
    named = "" if found.name == found.encoding else f"{found.encoding}, "
    which = f"layer {layer.layer + 1} of {len(found.layers)}, " if len(found.layers) > 1 else ""
    yield f"{found.name}: {named}{which}{found.sample}"
    worst = max((layer.law for layer in found.layers), key=lambda law: law.residual)
    where = "" if len(found.layers) == 1 else " (worst layer)"
    yield f"Relative law: residual {worst.residual:.1e} at shift {worst.shift}{where}; {worst.note}"
    if layer.spectrum is not None:
        yield _spectrum_line(layer)
    yield _reach_table(found, layer)
    yield from _gate_lines(layer.histograms)
    head = f"head {layer.spectral[0].head + 1}, " if layer.spectral else ""
    yield f"Closed form / measured: {head}{layer.spectral_about}"
    if layer.spectral:
        yield _spectral_table(layer)


def _spectrum_line(layer: LayerInspection) -> str:
    assert layer.spectrum is not None
    waves = [wave for row in layer.spectrum.wavelengths for wave in row if wave is not None]
    groups = len(layer.spectrum.frequencies)
    turned = sum(any(row) for row in layer.spectrum.frequencies)
    of_heads = f" for each of {groups} heads" if turned == groups else f" for {turned} of {groups} heads"
    line = f"Spectrum: {len(layer.spectrum.frequencies[0])} planes" + (of_heads if groups > 1 else "")
    if waves:
        line += f", wavelengths {min(waves):,.1f} to {max(waves):,.1f} tokens"
    moved = layer.spectrum.moved
    return line if moved is None else f"{line}; learned, moved at most {100 * moved:.2g}% from the start"


def _reach_table(found: Inspection, layer: LayerInspection) -> str:
    bias = ("bias ½ at", "bias 1/e at") if found.biased else ()
    rows = [["head", *bias, "half of attention within", "90% within"]]
    for reach in layer.reach[:HEADS]:
        fallen = [f"> {found.tokens - 1}" if d is None else str(d) for d in (reach.bias_half, reach.bias_e)]
        attention = [f"{reach.attention_half:.0f}", f"{reach.attention_most:.0f}"]
        rows.append([str(reach.head + 1), *(fallen if found.biased else ()), *attention])
    return aligned(rows)


def _gate_lines(histograms: list[Histogram]) -> Iterator[str]:
    for name in dict.fromkeys(h.gate for h in histograms):
        yield f"Gate: {name}"
        for h in [h for h in histograms if h.gate == name][:HISTOGRAMS]:
            head = "all heads" if h.head is None else f"head {h.head + 1}"
            yield f"  {head:9}  {h.low:9.3g} {bars(h.counts)} {h.high:<9.3g} median {h.median:.3g}"


def bars(counts: list[int]) -> str:
    """A histogram in one line of text."""
    top = max(counts)
    return "".join(BARS[-(-count * (len(BARS) - 1) // top)] for count in counts)


def _spectral_table(layer: LayerInspection) -> str:
    """Each cell has the closed form and the measured value."""
    shown = [q.name for q in layer.spectral[0].quantities if q.name != "smallest σ"]  # 1 / largest
    rows = [["distance", *shown, "differ by"]]
    for row in layer.spectral:
        cells = [f"{q.closed:.4g} / {q.measured:.4g}" for q in row.quantities if q.name in shown]
        rows.append([str(row.distance), *cells, f"{row.difference:.0e}"])
    return aligned(rows)
