"""The launch files of examples/launch, run with stand-ins for the schedulers: what they start is parsed for real."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("pydantic")

from torch.distributed.run import get_args_parser

from grape_pe.cli import main
from grape_pe.lab.train.describe import describe_rows

LAUNCH = Path(__file__).parent.parent / "examples/launch"
SLURM = {
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_ARRAY_JOB_ID": "7",
}
TRIES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
COMMANDS = {
    "grape": '[ "$*" = "recipes --rows" ] && exec cat "$ROWS"; exec "$PYTHON" -m grape_pe.cli "$@"',
    "torchrun": f'echo "{TRIES}=${TRIES} $*" >> "$SAID"; eval "$WORK"',
    "srun": 'exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo n1; else echo "scontrol $*" >> "$SAID"; fi',
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins on PATH; what they were asked is in `said`."""
    for name, does in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("WORK", "true")
    (tmp_path / "rows").write_text(describe_rows(8))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("ROWS", str(tmp_path / "rows"))
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run(*command: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, command)], env=os.environ | more, capture_output=True, text=True, timeout=300
    )


def check(line: str, nodes: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What torchrun was given, parsed by torchrun itself and by `grape train`; returns the latter's part."""
    given = shlex.split(line)
    assert given.pop(0) == f"{TRIES}=1"
    options = get_args_parser().parse_args(given)
    assert (options.module, options.training_script) == (True, "grape_pe.cli") and options.nnodes == nodes
    assert options.max_restarts == 3
    assert main([*options.training_script_args, "--dry-run", "--ranks", "8"]) == 0
    assert "GPU-hours" in capsys.readouterr().out
    assert "--resume" in options.training_script_args
    return list(options.training_script_args)


def said(cluster: Path) -> list[str]:
    return (cluster / "said").read_text().splitlines()


def test_slurm_runs_a_row_and_is_queued_again_until_it_is_done(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, task = cluster / "runs", {"SLURM_ARRAY_TASK_ID": "23"}
    script = (LAUNCH / "slurm.sh", runs, "--train.shard", 8)
    out = runs / "large-grape-ap-kv"
    saves = {"WORK": f"mkdir -p {out}/checkpoints/step-00000010; exit 1"}
    assert run(*script, **task, **saves).returncode == 0
    line, again = said(cluster)
    given = check(line, "2", capsys)
    assert given[:5] == ["train", "paper-large", "--encoding", "grape-ap", "--kv-shift"]
    assert given[-4:] == ["8", "--out", str(out), "--resume"]
    assert again == "scontrol requeue 7_23"
    run(*script, **task)  # no further than before: something is wrong with it
    run(*script, **task, WORK=f"mkdir -p {out}/checkpoints/step-00000020 {out}/final")
    assert [line.split()[0] for line in said(cluster)[2:]] == [f"{TRIES}=1"] * 2
    assert "has no run 24" in run(*script, SLURM_ARRAY_TASK_ID="24").stderr


def test_torchrun_on_several_nodes(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["paper-medium", "--encoding", "grape-ap", "--train.shard", "8", "--out", "x"]
    assert run(LAUNCH / "torchrun.sh", *words, NODES="4", HEAD="n1").returncode == 0
    check(said(cluster)[0], "4", capsys)


def test_skypilot(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    (tmp_path / "run.sh").write_text(task["run"])
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"}
    assert (
        run("-u", tmp_path / "run.sh", **task["envs"], **nodes, SKYPILOT_NUM_GPUS_PER_NODE="8").returncode
        == 0
    )
    assert "paper-medium" in check(said(cluster)[0], "2", capsys)


def test_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    [container] = worker["template"]["spec"]["containers"]
    program, *words = container["command"]
    [tries] = container["env"]
    assert program == "torchrun"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    restarts = f"--max-restarts={policy['maxRestarts']}"
    check(shlex.join([f"{tries['name']}={tries['value']}", restarts, "--nnodes=2", *words]), "2", capsys)


@pytest.mark.slow
def test_data_of_many_machines_is_joined(cluster: Path, tmp_path: Path) -> None:
    """Two parts instead of sixteen, of local text instead of FineWeb-Edu; otherwise as it is."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 3000)
    script = (LAUNCH / "data.sh").read_text()
    script = script.replace("fineweb-edu-100B --part", f"{tmp_path}/?.txt --tokenizer bytes --part")
    script = (
        script.replace("PARTS=16", "PARTS=2").replace("--workers 64", "--workers 1").replace("gpt2", "bytes")
    )
    (tmp_path / "data.sh").write_text(script)
    out = tmp_path / "data"
    assert run(tmp_path / "data.sh", out, SLURM_ARRAY_TASK_ID="1").returncode == 0
    assert "part 2 is not done" in run(tmp_path / "data.sh", out, "join").stderr
    assert run(tmp_path / "data.sh", out, SLURM_ARRAY_TASK_ID="2").returncode == 0
    done = run(tmp_path / "data.sh", out, "join")
    assert done.returncode == 0 and re.search(r"val .* 2 shards", done.stdout), done.stderr
