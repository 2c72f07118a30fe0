"""The figures of docs/idea.md, drawn from the library itself, and that of README.md, drawn from stored results:

    python tools/figures.py

writes docs/assets/*.svg. The same seed gives the same files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from chart import COLOURS, Chart
from torch import Tensor

import grape_pe as grape
from grape_pe.lab.config import shipped_evidence
from grape_pe.lab.report.ranking import length_blocks
from grape_pe.lab.report.reading import read_results
from grape_pe.testing import Sample, scores

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
HEADS, HEAD_DIM, WIDTH = 4, 32, 128
TOKENS = 64
HEAD = 0  # the one that is drawn; its slope is 1/4
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = COLOURS


def random_text(tokens: int = TOKENS, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and x of a text of random tokens: what an untrained layer would see."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, heads, tokens, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    return q, k, torch.randn(1, tokens, WIDTH, dtype=torch.float64)


def built(name: str, heads: int = HEADS, **options: object) -> grape.Encoding:
    torch.manual_seed(1)
    return grape.build(name, heads=heads, head_dim=HEAD_DIM, width=WIDTH, **options).double()


@torch.no_grad()
def bias_matrix(name: str, head: int = HEAD, tokens: int = TOKENS) -> Tensor:
    """b(t, j) of one head on the random text."""
    q, k, x = random_text(tokens)
    bias = built(name)(q, k, x=x).bias
    return bias.tile(slice(0, tokens), slice(0, tokens)).expand(1, HEADS, tokens, tokens)[0, head]


def turning() -> Chart:
    """A key in one plane, at positions 0 to 5."""
    chart = Chart("one key at positions 0 … 5", (-1.35, 1.35), (-1.35, 1.35), square=True)
    enc = grape.build("rope", heads=1, head_dim=2, base=10000.0).double()
    key = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 1, 6, 2)
    placed = enc(key, key, positions=torch.arange(6) * 0.5).k[0, 0]
    circle = [i * math.pi / 60 for i in range(121)]
    chart.line([math.cos(a) for a in circle], [math.sin(a) for a in circle], GREY, "3 4")
    for n, (x, y) in enumerate(placed.tolist()):
        chart.line([0, x], [0, y], BLUE).dot(x, y, BLUE)
        chart.label(1.17 * x, 1.17 * y - 0.05, str(n), "middle")
    return chart


def same_angle() -> Chart:
    """Query and key moved along together keep their angle."""
    chart = Chart("both moved by 4: the same angle", (-1.5, 1.5), (-1.5, 1.5), square=True)
    enc = grape.build("rope", heads=1, head_dim=2, base=10000.0).double()
    unit = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 1, 2, 2)
    circle = [i * math.pi / 60 for i in range(121)]
    chart.line([math.cos(a) for a in circle], [math.sin(a) for a in circle], GREY, "3 4")
    for shift, dash in ((0, ""), (4, "5 3")):
        ends = enc(unit, unit, positions=(torch.tensor([1, 3]) + shift) * 0.5).k[0, 0].tolist()
        for (x, y), name, colour, n in zip(ends, "kq", (BLUE, ORANGE), (1, 3), strict=True):
            chart.line([0, x], [0, y], colour, dash).dot(x, y, colour)
            aside = 0.0 if abs(x) < 0.2 else math.copysign(0.07, x)
            anchor = "middle" if not aside else "start" if x > 0 else "end"
            chart.label(1.08 * x + aside, 1.12 * y - 0.04, f"{name} at {n + shift}", anchor)
    return chart


def rotation_kernel(title: str, furthest: int, log: bool) -> Chart:
    """<G_t q, G_j q> for q = (1, …, 1), divided by its value at distance 0."""
    steps = 240
    ends = (0.0, math.log10(furthest)) if log else (0.0, float(furthest))
    label = "distance, 10ⁿ tokens" if log else "distance, tokens"
    chart = Chart(title, ends, (-1.0 if log else -2.0, 1.0), label, "score / score at 0")
    ticks = [0, 1, 2, 3, 4, 5] if log else [0, furthest // 4, furthest // 2, 3 * furthest // 4, furthest]
    chart.axes(ticks, [-1, -0.5, 0, 0.5, 1])
    at = [ends[1] * i / steps for i in range(steps + 1)]
    distance = torch.tensor([10**a if log else a for a in at], dtype=torch.float64)
    for said, options, colour in (
        ("one plane", {"head_dim": 2}, GREY),
        ("32 planes, base 10,000", {"head_dim": 64}, BLUE),
        ("32 planes, base 500,000", {"head_dim": 64, "base": 500000.0}, ORANGE),
    ):
        if log and said == "one plane":
            continue
        enc = grape.build("rope", heads=1, **options).double()
        ones = torch.ones(1, 1, len(at), options["head_dim"], dtype=torch.float64)
        moved = enc(ones, ones, positions=distance).k[0, 0].sum(-1) / options["head_dim"]
        chart.line(at, moved.tolist(), colour).legend(said, colour, ends[1] * 0.36, -0.6 if log else -1.3)
    return chart


def slopes() -> Chart:
    """ALiBi: a straight line for each head."""
    chart = Chart("alibi: one slope a head", (0, 60), (-16, 0), "distance, tokens", "bias (logits)")
    chart.axes([0, 20, 40, 60], [-16, -12, -8, -4, 0])
    q, k, x = random_text(heads=8)
    bias = built("alibi", heads=8)(q, k, x=x).bias.tile(slice(63, 64), slice(0, 64))[0, :, 0]
    for head in range(8):
        curve = bias[head].flip(0)[:61].tolist()
        chart.line(list(range(61)), curve, COLOURS[head % 5])
    return chart


def curves(name: str, title: str, low: float) -> Chart:
    """Three queries of one head looking back, beside ALiBi's line."""
    chart = Chart(title, (0, 40), (low, 0), "distance, tokens", "bias (logits)")
    chart.axes([0, 10, 20, 30, 40], [low * i / 4 for i in range(5)])
    matrix = bias_matrix(name)
    if name != "alibi":
        line = bias_matrix("alibi")[63].flip(0)[:41].tolist()
        chart.line(list(range(41)), line, GREY, "4 4").legend("alibi", GREY, 1.5, low * 0.68)
    for t, colour in ((63, BLUE), (56, ORANGE), (48, GREEN)):
        curve = matrix[t, : t + 1].flip(0)[:41].tolist()
        chart.line(list(range(41)), curve, colour).legend(f"query {t}", colour, 1.5, low * 0.68)
    return chart


def path_edges() -> Chart:
    """What each token between costs, in one query's eyes."""
    chart = Chart("what each token costs query 20", (0, 21), (-0.32, 0), "token l", "edge ψ(20, l)")
    chart.axes([0, 5, 10, 15, 20], [-0.3, -0.2, -0.1, 0])
    row = bias_matrix("grape-ap")[20, :21]
    for l in range(1, 21):  # noqa: E741 (the letter of Eq. P2)
        chart.bar(l, float(row[l - 1] - row[l]), BLUE)
    return chart


def path_sum() -> Chart:
    """The bias of a key: all edges to its right."""
    chart = Chart("… and their sum from key j to 20", (0, 21), (-4.0, 0), "key j", "bias b(20, j)")
    chart.axes([0, 5, 10, 15, 20], [-4, -3, -2, -1, 0])
    row = bias_matrix("grape-ap")[20, :21].tolist()
    chart.line(list(range(21)), row, BLUE)
    for j, value in enumerate(row):
        chart.dot(j, value, BLUE, 2.5)
    return chart


@torch.no_grad()
def seen(name: str) -> Chart:
    """Attention weights of one head on the random text: which keys a query sees."""
    size = 24
    chart = Chart(f"{name}: what each query sees", (0, size), (0, size), "key", "query", square=True)
    q, k, x = random_text(size)
    logits = scores(built(name), Sample(q, k, q, x, torch.arange(size)))
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(hidden, -math.inf).softmax(-1)[0, HEAD]
    for t in range(size):
        for j in range(t + 1):
            chart.cell(j, size - 1 - t, BLUE, math.sqrt(float(weights[t, j])))
    chart.axes([], [])
    for n in (0, 10, 20):
        chart.label(n + 0.5, -1.5, str(n), "middle").label(-0.4, size - 1 - n, str(n), "end")
    return chart


def lengths() -> Chart:
    """Loss beyond the training length, from the shipped results of `grape compare small`."""
    evidence = shipped_evidence("small")
    assert evidence is not None
    results = read_results([evidence])
    tested = results.lengths()
    chart = Chart(
        "loss beyond the training length", (0.0, len(tested) - 1.0), (2.0, 3.4), "length", "loss (nats)"
    )
    chart.axes(range(len(tested)), [2.0, 2.4, 2.8, 3.2], [results.times(length) for length in tested])
    for name, colour in zip(("rope", "grape-ap", "alibi", "grape-a-qk", "fox"), COLOURS, strict=False):
        losses = [length_blocks(results, length).means[name] for length in tested]
        chart.line(list(range(len(tested))), losses, colour).legend(name, colour, 0.15, 3.3)
    return chart


FIGURES: dict[str, Callable[[], Chart]] = {
    "turning": turning,
    "same-angle": same_angle,
    "rotation-near": lambda: rotation_kernel("rotations: near", 40, log=False),
    "rotation-far": lambda: rotation_kernel("rotations: far", 100_000, log=True),
    "slopes": slopes,
    "bias-grape-a-qk": lambda: curves("grape-a-qk", "grape-a-qk: contents set the slope", -16.0),
    "bias-fox": lambda: curves("fox", "fox: each token forgets", -32.0),
    "bias-grape-ap": lambda: curves("grape-ap", "grape-ap: the query judges the path", -8.0),
    "path-edges": path_edges,
    "path-sum": path_sum,
    "sees-rope": lambda: seen("rope"),
    "sees-alibi": lambda: seen("alibi"),
    "sees-grape-ap": lambda: seen("grape-ap"),
    "sees-both": lambda: seen("rope+grape-ap"),
    "lengths": lengths,
}


def main() -> None:
    torch.set_num_threads(1)
    ASSETS.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        with torch.no_grad():
            (ASSETS / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(f"docs/assets/{name}.svg")


if __name__ == "__main__":
    main()
