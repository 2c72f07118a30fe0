"""`examples/paper_loop.py` as a user runs it: text, four encodings on two ranks each, scores, tables and figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "paper_loop.py"
ENCODINGS = ["rope", "fox", "grape-a-qk", "grape-ap"]


def loop(place: Path) -> str:
    """The command, and the commands it ran."""
    home = {"HF_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=place, env={**os.environ, **home}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_papers_loop_in_miniature(tmp_path: Path) -> None:
    said = loop(tmp_path)
    assert len(re.findall(r"nproc_per_node=2 -m grape_pe.cli train", said)) == 4
    assert len(re.findall(r"nproc_per_node=2 -m grape_pe.cli eval lm", said)) == 4
    page = (tmp_path / "results/paper/paper.html").read_text()
    table = page.split('id="table-paper-medium"')[1].split("</table>")[0]
    for name in ENCODINGS:
        run = tmp_path / "results/paper/runs" / name
        score = json.loads((run / "lm_eval.json").read_text())["tasks"]["continuation"]
        assert score["samples"] == 200 and score["acc"] > 0.35, (name, score)  # chance is 0.25 ± 0.03
        cell = f"{100 * score['acc']:.2f} ± {100 * score['acc_stderr']:.2f}"
        [row] = re.findall(rf'<tr><th scope="row" data-value="{name}, {name} acc">.*?</tr>', table)
        assert cell in row and "not comparable" in row, row
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    for key in ("training-medium", "validation-medium"):
        curves = {each["name"]: each["y"] for each in figures[key]["views"][0]["data"]}
        assert list(curves) == ENCODINGS
        assert all(len(y) >= 5 and y[-1] < y[0] - 1 for y in curves.values()), key
    again = loop(tmp_path)
    assert "cli train" not in again and "cli eval" not in again
    assert (tmp_path / "results/paper/paper.html").read_text() == page
