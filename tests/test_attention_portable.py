"""The CPU kernel on other processors than this one: built and run alone, against loops in float64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from grape_pe.attention.cpu import build as native

TESTS = Path(__file__).parent
FLAGS = [
    "-O2",
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Werror",
]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-psabi", "-I", str(Path(native.__file__).parent)]

#: compiler, its flags, and what runs the program; the first needs nothing but g++ on x86
PROCESSORS = {
    "x86-64 without AVX": ("g++", ["-march=x86-64"], []),
    "x86-64 with AVX2": ("g++", ["-march=haswell"], ["qemu-x86_64", "-cpu", "max"]),
    "aarch64": ("aarch64-linux-gnu-g++", ["-static"], ["qemu-aarch64"]),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_kernel_alone(processor, tmp_path):
    compiler, options, runner = PROCESSORS[processor]
    missing = [tool for tool in (compiler, *runner[:1]) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if (
        options == ["-march=x86-64"]
        and subprocess.run(["uname", "-m"], capture_output=True).stdout != b"x86_64\n"
    ):
        pytest.skip("this is not an x86-64 machine")
    program = tmp_path / "kernel"
    source = str(TESTS / "native_kernel.cpp")
    subprocess.run([compiler, *FLAGS, *options, source, "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout + done.stderr
