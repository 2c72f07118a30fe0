"""One thread a worker: tests are many and small, and run side by side.

The CPU kernel is built before the first test, so that its line on stderr and its time belong to none of them.
Hypothesis draws the same examples in every run, without time limits: a run on a loaded machine gives the same result.
"""

import hypothesis
import pytest
import torch

from grape_pe.attention.cpu import build

torch.set_num_threads(1)
build.available()
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    """Commands that a test runs in this process may set the number of threads; the next test has one again."""
    torch.set_num_threads(1)
