"""`grape inspect CHECKPOINT|NAME`: the diagnostics of one encoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require
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
    require("rich", "lab")
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
    show(found, found.layers[options.layer - 1])
    if options.html:
        print(f"Picture: {options.html}")
    return OK


def show(found: Inspection, layer: LayerInspection) -> None:
    """Print one layer."""
    console = require("rich.console", "lab").Console(highlight=False, soft_wrap=True)
    escape = require("rich.markup", "lab").escape  # options stand in brackets
    named = "" if found.name == found.encoding else f"{escape(found.encoding)}, "
    which = f"layer {layer.layer + 1} of {len(found.layers)}, " if len(found.layers) > 1 else ""
    console.print(f"[bold]{escape(found.name)}[/bold]: {named}{which}{found.sample}")
    console.print(_law_line(found))
    if layer.spectrum is not None:
        console.print(_spectrum_line(layer))
    console.print(_reach_table(found, layer))
    for line in _gate_lines(layer.histograms):
        console.print(line)
    console.print(f"[bold]Closed form / measured[/bold]: {layer.spectral_about}")
    if layer.spectral:
        console.print(_spectral_table(layer))


def _law_line(found: Inspection) -> str:
    worst = max((layer.law for layer in found.layers), key=lambda law: law.residual)
    where = "" if len(found.layers) == 1 else " (worst layer)"
    residual = f"residual {worst.residual:.1e} at shift {worst.shift}{where}"
    return f"[bold]Relative law[/bold]: {residual}; {worst.note}"


def _spectrum_line(layer: LayerInspection) -> str:
    assert layer.spectrum is not None
    waves = [wave for row in layer.spectrum.wavelengths for wave in row if wave is not None]
    count = len(layer.spectrum.frequencies[0])
    groups = len(layer.spectrum.frequencies)
    turned = sum(any(row) for row in layer.spectrum.frequencies)
    of_heads = f" for each of {groups} heads" if turned == groups else f" for {turned} of {groups} heads"
    line = f"[bold]Spectrum[/bold]: {count} planes" + (of_heads if groups > 1 else "")
    if waves:
        line += f", wavelengths {min(waves):,.1f} to {max(waves):,.1f} tokens"
    moved = layer.spectrum.moved
    return line if moved is None else f"{line}; learned, moved at most {100 * moved:.2g}% from the start"


def _table(*columns: str) -> Any:
    table = require("rich.table", "lab").Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _reach_table(found: Inspection, layer: LayerInspection) -> Any:
    bias = ("bias ½ at", "bias 1/e at") if found.biased else ()
    table = _table("head", *bias, "half of attention within", "90% within")
    for reach in layer.reach[:HEADS]:
        fallen = [f"> {found.tokens - 1}" if d is None else str(d) for d in (reach.bias_half, reach.bias_e)]
        attention = [f"{reach.attention_half:.0f}", f"{reach.attention_most:.0f}"]
        table.add_row(str(reach.head + 1), *(fallen if found.biased else ()), *attention)
    return table


def _gate_lines(histograms: list[Histogram]) -> list[str]:
    lines = []
    for name in dict.fromkeys(h.gate for h in histograms):
        lines.append(f"[bold]Gate[/bold]: {name}")
        for h in [h for h in histograms if h.gate == name][:HISTOGRAMS]:
            head = "all heads" if h.head is None else f"head {h.head + 1}"
            lines.append(f"  {head:9}  {h.low:9.3g} {bars(h.counts)} {h.high:<9.3g} median {h.median:.3g}")
    return lines


def bars(counts: list[int]) -> str:
    """A histogram in one line of text."""
    top = max(counts)
    return "".join(BARS[-(-count * (len(BARS) - 1) // top)] for count in counts)


def _spectral_table(layer: LayerInspection) -> Any:
    """Each cell has the closed form and what was measured."""
    shown = [q.name for q in layer.spectral[0].quantities if q.name != "smallest σ"]  # 1 / largest
    table = _table("distance", *shown, "differ by")
    for row in layer.spectral:
        cells = [f"{q.closed:.4g} / {q.measured:.4g}" for q in row.quantities if q.name in shown]
        table.add_row(str(row.distance), *cells, f"{row.difference:.0e}")
    return table
