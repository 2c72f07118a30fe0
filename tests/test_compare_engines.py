"""`grape compare --on`: Ray that loses a node, submitit, stand-ins for Slurm, torchrun; results as by local."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from grape_pe.lab.compare.comparison import check_data, jobs, join_directory, load_comparison
from grape_pe.lab.compare.engines import Local, Resources, Work, open_engine
from grape_pe.lab.compare.run import works
from grape_pe.lab.compare.schedule import run_side_by_side
from grape_pe.lab.errors import LabError
from grape_pe.lab.train.distributed import World
from grape_pe.lab.train.feed import open_feed
from grape_pe.lab.train.run_directory import latest_metrics
from lab_runs import TINY, tiny_data

STEPS = 60
LIMIT = 300.0  # seconds after which a test gives up waiting
#: an encoding whose runs are slow until the file `go` is beside it; that changes no result
SLOW = """
import time
from pathlib import Path
import grape_pe as grape
from grape_pe.encodings.base import Encoded, Encoding

GO = Path(__file__).with_name("go")

class Slow(Encoding):
    def encode(self, tokens, state):
        if not GO.exists():
            time.sleep(0.5)
        return Encoded(tokens.q, tokens.k, grape.NoBias())

grape.register("slow", Slow)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a comparison of two arms, the slow encoding; and in `whole` what a run here gives."""
    home = tmp_path_factory.mktemp("home")
    sections: dict[str, dict[str, object]] = {"data": {"source": str(tiny_data(home))}}
    settings = {
        **TINY,
        "train.steps": STEPS,
        "train.eval_every": 0,
        "log.every": 2,
        "data.tokenizer": "bytes",
    }
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    recipe = {"base": "demo", **sections}
    arms = ["slow", "slow+kv"]
    (home / "mine.yaml").write_text(
        json.dumps({"name": "mine", "recipe": recipe, "arms": arms, "evaluation_tokens": 64})
    )
    (home / "slow_encoding.py").write_text(SLOW)
    (home / "go").touch()
    assert grape(home, "whole").wait(LIMIT) == 0
    return home


@pytest.fixture
def gate(home: Path) -> Iterator[Path]:
    """Closed while a test looks for a moment to break things."""
    (home / "go").unlink(missing_ok=True)
    yield home / "go"
    (home / "go").touch()


def grape(home: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    words = [
        "--import",
        "slow_encoding",
        "compare",
        "mine.yaml",
        "--out",
        out,
        "--threads",
        "1",
        "--quiet",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "grape_pe.cli", *words], cwd=home, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=open(home / f"{out}.stderr", "ab"),
    )  # fmt: skip


def measured(root: Path) -> list[dict[str, Any]]:
    """What a comparison found, to the last bit; not how fast."""
    lines = [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]
    times = ("tokens_per_second", "peak_memory_bytes", "seconds")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


def wait_until(holds: Callable[[], object], running: subprocess.Popen[bytes] | None = None) -> None:
    ends = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < ends, "nothing happened"
        assert running is None or running.poll() is None, "it ended early"
        time.sleep(0.05)


def under_way(root: Path) -> bool:
    """Whether both runs have a checkpoint, and are not done."""
    runs = [root / "runs" / name for name in ("slow-s0", "slow+kv-s0")]
    return all(latest_metrics(run, "train").get("step", 0) > 4 for run in runs)


def attempts(root: Path) -> list[int]:
    return sorted(path.read_text().count("=== ") for path in (root / "logs/runs").glob("*/output.txt"))


def workers(root: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(root) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def interrupted(running: subprocess.Popen[bytes], root: Path) -> None:
    """Ctrl-C: ends with 130, and leaves no run behind."""
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(LIMIT) == 130
    wait_until(lambda: not workers(root))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with one each."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'grape-pe[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = (
        "120"  # of the cluster; a busy machine needs longer
    )
    head = {"num_cpus": 0, "ray_client_server_port": 23456, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


ON_RAY = ["--on", "ray://127.0.0.1:23456", "--gpus-per-job", "0"]


@pytest.mark.slow
def test_ray_loses_a_node_and_the_run_on_it_goes_on_elsewhere(home, gate, cluster) -> None:
    root = home / "on-ray"
    running = grape(home, root.name, *ON_RAY)
    wait_until(lambda: under_way(root), running)
    cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
    gate.touch()
    assert running.wait(LIMIT) == 0, (home / "on-ray.stderr").read_text()
    assert attempts(root) == [1, 2] and measured(root) == measured(home / "whole")
    cluster.nodes.append(cluster.add_node(num_cpus=1))


@pytest.mark.slow
def test_what_ctrl_c_stopped_on_ray_is_finished_here(home, gate, cluster) -> None:
    root = home / "stopped"
    running = grape(home, root.name, *ON_RAY)
    wait_until(lambda: under_way(root), running)
    interrupted(running, root)
    saved = [latest_metrics(root / "runs" / name, "train")["step"] for name in ("slow-s0", "slow+kv-s0")]
    assert all(4 < step < STEPS for step in saved) and not (root / "results.jsonl").exists()
    gate.touch()
    assert grape(home, root.name).wait(LIMIT) == 0
    assert measured(root) == measured(home / "whole")


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_a_sentence(home) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'grape-pe[ray]'")
    assert grape(home, "nowhere", "--on", "ray://127.0.0.1:9", "--gpus-per-job", "0").wait(LIMIT) == 2
    said = (home / "nowhere.stderr").read_text()
    assert "grape: cannot connect to Ray at ray://127.0.0.1:9" in said and "Traceback" not in said
    assert not (home / "nowhere/compare.json").exists()


@pytest.mark.slow
def test_a_job_of_submitit_is_killed_and_made_again(home, gate) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'grape-pe[slurm]'")
    root = home / "submitit"
    running = grape(
        home,
        root.name,
        "--on",
        "slurm",
        "--gpus-per-job",
        "0",
        "--slurm",
        "time=60",
        "--slurm",
        "cluster=local",
    )
    wait_until(lambda: under_way(root), running)
    controller = psutil.Process(
        int(json.loads((root / "logs/slurm/submitted.json").read_text())["runs/slow-s0"])
    )
    for process in [controller, *controller.children()]:  # not the run, which ends by itself
        process.kill()
    gate.touch()
    assert running.wait(LIMIT) == 0, (home / "submitit.stderr").read_text()
    assert attempts(root) == [1, 2] and measured(root) == measured(home / "whole")


#: Slurm as far as submitit talks to it: a job is a process, and its number that of the process
SBATCH = """
import os, subprocess, sys
from pathlib import Path
state = Path(__file__).parent / "state"
state.mkdir(exist_ok=True)
job = subprocess.Popen(
    ["bash", "-c", 'export SLURM_JOB_ID=$$; exec bash "$0"', os.path.realpath(sys.argv[1])],
    start_new_session=True, stdin=-3, stdout=-3, stderr=-3,
)
(state / str(job.pid)).write_text(Path(sys.argv[1]).read_text())
print("Submitted batch job", job.pid)
"""
SRUN = """
import os, sys
words = sys.argv[1:]
words = words[next(i for i, word in enumerate(words) if "python" in os.path.basename(word)):]
os.execv(words[0], words)
"""
SACCT = """
import sys, psutil
print("JobID|State|NodeList")
for pid in sys.argv[5::2]:
    alive = psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie"
    print(f"{pid}|{'RUNNING' if alive else 'CANCELLED'}|here")
"""
SCANCEL = """
import sys, psutil
job = psutil.Process(int(sys.argv[1]))
for process in job.children(recursive=True):
    process.terminate()
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins on PATH; in `state` is a file for each job."""
    pytest.importorskip("submitit", reason="needs submitit: pip install 'grape-pe[slurm]'")
    for name, code in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scancel": SCANCEL}.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{code}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "state"


ON_SLURM = [
    "--on", "slurm", "--gpus-per-job", "0", "--slurm", "time=1-02:00:00", "--slurm", "partition=cpu", "--slurm",
    "reservation=paper",
]  # fmt: skip


@pytest.mark.slow
def test_jobs_of_slurm_outlive_the_command_and_are_found_again(home, gate, slurm) -> None:
    root = home / "on-slurm"
    running = grape(home, root.name, *ON_SLURM)
    wait_until(lambda: under_way(root), running)
    running.kill()
    running.wait()
    again = grape(home, root.name, *ON_SLURM)
    time.sleep(5)
    gate.touch()
    assert again.wait(LIMIT) == 0, (home / "on-slurm.stderr").read_text()
    assert attempts(root) == [1, 1] and measured(root) == measured(home / "whole")
    asked = [path.read_text() for path in slurm.iterdir()]
    assert len(asked) == 2
    for line in ("time=1560", "partition=cpu", "reservation=paper", "cpus-per-task=1", "ntasks-per-node=1"):
        assert all(f"#SBATCH --{line}\n" in each for each in asked), asked[0]


@pytest.mark.slow
def test_ctrl_c_cancels_jobs_of_slurm(home, gate, slurm) -> None:
    root = home / "cancelled"
    running = grape(home, root.name, *ON_SLURM)
    wait_until(lambda: under_way(root), running)
    interrupted(running, root)
    gate.touch()
    assert grape(home, root.name, *ON_SLURM).wait(LIMIT) == 0
    assert attempts(root) == [2, 2] and measured(root) == measured(home / "whole")


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "needs the time limit of a job: give --slurm time=MINUTES"),
        ({"time": "soon"}, "time must be minutes, H:MM:SS or D-HH:MM:SS, got 'soon'"),
        ({"time": "5", "nodes": "2"}, r"--slurm nodes is not allowed \(a run has one node\)"),
        ({"time": "5", "cluster": "here"}, "cluster must be slurm, or local"),
        ({"time": "5", "cluster": "local", "partition": "gpu"}, "partition has no effect with cluster=local"),
        ({"time": "5"}, "needs srun and sbatch"),
    ],
)
def test_what_slurm_cannot_be_given_is_refused(given, said, tmp_path, monkeypatch) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'grape-pe[slurm]'")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=said):
        open_engine("slurm", tmp_path / "logs", given)
    assert not list(tmp_path.iterdir())


def test_times_of_slurm(tmp_path) -> None:
    from grape_pe.lab.compare.engines.on_slurm import minutes

    times = {"90": 90, "90:30": 91, "4:00:00": 240, "1-2": 1560, "1-2:30": 1590, "1-00:00:01": 1441}
    assert {text: minutes(text) for text in times} == times


def test_an_engine_elsewhere_must_be_told_the_gpus(tmp_path) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'grape-pe[slurm]'")
    engine = open_engine("slurm", tmp_path, {"time": "5", "cluster": "local"})
    with pytest.raises(LabError, match="--gpus-per-job"):
        engine.resources(0, None, None)
    assert engine.resources(0, None, 2) == Resources(threads=1, gpus=2)


RANKS = """
import sys
from grape_pe.lab.compare import worker
worker.end_with_input()
stopped = worker.under_torchrun(sys.argv[1:], 2)
raise SystemExit(128 + stopped if stopped else 0)
"""


def as_ranks(root: Path, data: Path, budgets: Sequence[int] = (), **settings: object) -> Work:
    """The runs of a comparison as two ranks each, which on this machine are processes without GPUs."""
    given = {**TINY, "data.source": str(data), "data.tokenizer": "bytes", "train.schedule": "wsd", **settings}
    comparison = load_comparison("demo", arms=["rope"], budgets=budgets, overrides=given)
    comparison = comparison.model_copy(update={"evaluation_tokens": 64})
    root.mkdir()
    join_directory(root, comparison, Resources(1, 0))
    check_data(root, open_feed(comparison.recipe, World()).identity)
    (made,) = works(list(jobs(comparison)), root, Resources(1, 0))
    return replace(made, arguments=("-c", RANKS, *made.arguments[2:]))


@pytest.mark.slow
def test_a_run_of_several_ranks_is_trained_by_all_and_evaluated_by_one(tmp_path) -> None:
    data = tiny_data(tmp_path)
    run_side_by_side([as_ranks(tmp_path / "out", data, [512, 1024])], Local(), 1)
    found = json.loads((tmp_path / "out/runs/rope-s0/evaluation.json").read_text())
    assert [entry["tokens"] for entry in found["budgets"]] == [512, 1024, 1536]
    assert all(1 < entry["loss"] < 8 for entry in found["budgets"])
    with pytest.raises(LabError, match=r"^train.batch must be a multiple of the 2 ranks, got 3"):
        run_side_by_side([as_ranks(tmp_path / "odd", data, **{"train.batch": 3})], Local(), 1)


@pytest.mark.slow
def test_ranks_save_when_their_run_is_cancelled(tmp_path) -> None:
    work, engine = as_ranks(tmp_path / "out", tiny_data(tmp_path), **{"train.steps": 100_000}), Local()
    run = tmp_path / "out/runs/rope-s0"
    handle = engine.submit(work)
    wait_until(lambda: latest_metrics(run, "train").get("step", 0) > 4)
    engine.cancel(handle)
    wait_until(lambda: engine.poll(handle) is not None)
    assert engine.poll(handle) == 128 + signal.SIGTERM, work.log.read_text()
    last = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert last >= latest_metrics(run, "train")["step"]
