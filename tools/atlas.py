"""Write docs/atlas.md and the README's table of encodings from the registry, so that no row is typed by hand.

    python tools/atlas.py

Both are texts about encodings (`Encoding.facts`) and laws measured here; neither has times.
"""

from __future__ import annotations

import re
from pathlib import Path

from grape_pe import names
from grape_pe.lab.atlas.entries import measure
from grape_pe.lab.atlas.markdown import atlas_markdown, readme_table

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\| name \| what it does .*\n(?:\|.*\n)*", re.M)
HEAD = """# Atlas

Every encoding with its formula, group element, laws, options and source. This page is written from the registry by
`python tools/atlas.py`. [`grape atlas`](commands.md) writes a page with more: the deviation from each law as a
number, the cost of a step on your machine, and pictures of bias and reach. [Choosing an encoding](choosing.md) says
which to start with.

Letters: $D$ features of a head, $h$ a head, $t$ the query's token, $j$ the key's, $n$ a position, `s_h` ALiBi's
slopes, `sp` softplus, `σ` sigmoid. Laws are measured in float32 on random tokens, with all parameters moved off their
initial values:

- *relative*: shifting all positions changes no score.
- *composition*: G(n) G(m) = G(n + m) for rotations; for biases, linear in the offset or additive along the path.
- *streaming*: any split of the sequence gives the same scores.
- *non-positive*: the bias favours no key in the past.

"Bytes in a cache" are kept for each token beyond key and value, with 8 heads of 64 features in float32.

"""


def documents() -> dict[Path, str]:
    """The files that are made from the registry, with their text."""
    entries = [measure(name, timed=False) for name in names()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme_table(entries)
    return {
        ROOT / "README.md": TABLE.sub(lambda _: table, readme),
        ROOT / "docs" / "atlas.md": HEAD + atlas_markdown(entries),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
