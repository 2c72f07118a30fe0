"""Runs as tasks of an existing Ray cluster, or of one that is started on this machine."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any, Self

from ....extras import require
from ...errors import LabError
from . import launch
from .engine import STOPPED, Lost, Remote, Work, changes


class OnRay(Remote):
    """A run requests its threads as CPUs of Ray, which chooses the node.

    Args:
        address: HOST:PORT of Ray's client server, "auto" for the cluster of this machine, or "" to start one if
            there is none.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.ray: Any = require("ray", "ray")

    def __enter__(self) -> Self:
        # the default of newer versions of Ray, which otherwise warn
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = {"": None, "auto": "auto"}.get(self.address, f"ray://{self.address}")
        options = {} if address else {"include_dashboard": False}
        try:
            self.ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError) as problem:
            reason = (
                str(problem).strip().rpartition("\n")[2]
            )  # before it there may be a traceback of the server
            raise LabError(f"cannot connect to Ray at {address or 'this machine'}: {reason}") from None
        self.ray.cloudpickle.register_pickle_by_value(
            launch
        )  # so that Ray's workers need not import grape_pe
        self.task = self.ray.remote(max_retries=0)(launch.run)
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()

    def submit(self, work: Work) -> Any:
        wanted = work.resources
        task = self.task.options(num_cpus=wanted.cpus, num_gpus=wanted.gpus, name=work.title)
        return task.remote(work.arguments, work.log, os.getcwd(), changes(wanted))

    def poll(self, handle: Any) -> int | None:
        errors = self.ray.exceptions
        try:
            if not self.ray.wait([handle], timeout=0)[0]:
                return None
            code: int = self.ray.get(handle)
        except errors.RayTaskError as failed:
            raise LabError(f"Ray: {' '.join(str(failed.cause).split())}") from None
        except (errors.RaySystemError, ConnectionError) as gone:
            raise LabError(f"the Ray cluster does not answer: {' '.join(str(gone).split())}") from None
        except errors.RayError as gone:
            raise Lost(str(gone).partition("\n")[0]) from None
        if code in STOPPED:
            raise Lost("its node asked it to end")
        return code

    def cancel(self, handle: Any, force: bool = False) -> None:
        with suppress(ConnectionError, self.ray.exceptions.RayError):  # the cluster may be gone
            self.ray.cancel(handle, force=force)
