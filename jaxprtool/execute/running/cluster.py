"""The cluster of processes that run one program: joining it, and values that all of them share."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxprtool.errors import BackendError
from jaxprtool.processes.group import Place

#: The time limit for the start of all processes of a cluster, in seconds.
PATIENCE = 60

#: The variables with the number of processes that `srun` or `mpirun` starts. In the script of a
#: job of Slurm, which is one process, the first one is not set; SLURM_NTASKS is.
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def is_started_by_cluster(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if Slurm, Open MPI or Kubernetes has started this process in a cluster."""
    sizes = [env.get(name, "") for name in _SIZES]
    several = any(size.isdigit() and int(size) > 1 for size in sizes)
    return several or ("KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env)


def join(place: Place | None, seconds: float = PATIENCE) -> None:
    """Join a cluster, before JAX starts a backend.

    Args:
        place: The place of this process; None to let JAX detect it.
        seconds: The time to wait for the other processes.

    Raises:
        BackendError: If the coordinator does not answer, or JAX cannot join.
    """
    try:
        if place is None:
            jax.distributed.initialize(initialization_timeout=int(seconds))
            return
        if place.number:
            _await_coordinator(place.coordinator, seconds)
        jax.distributed.initialize(
            place.coordinator, place.count, place.number, initialization_timeout=int(seconds)
        )
    except (RuntimeError, ValueError) as error:
        text = str(error).strip().partition("\n")[0]
        raise BackendError(f"this process cannot join the cluster: {text}") from error


def _await_coordinator(address: str, seconds: float) -> None:
    """Wait until the coordinator listens, since JAX aborts the process if it does not."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, min(5, seconds))).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise BackendError(
                    f"the coordinator {address} did not answer within {seconds:.0f} s: "
                    f"{error.strerror or error}",
                    "start the command with --process-id 0 on that machine",
                ) from error
            time.sleep(0.2)


def require_all(size: int) -> None:
    """Raise BackendError if a mesh of `size` devices does not use all devices of the cluster."""
    if size < jax.device_count():
        raise BackendError(
            f"the mesh has {size} device{'s' if size > 1 else ''}, but the {jax.process_count()} "
            f"processes have {jax.device_count()}",
            "a run in several processes uses all devices: make the mesh larger, or give each "
            "process fewer devices with --host-devices",
        )


def is_first() -> bool:
    """Return True in the process that shows results: the only one, or number 0 of a cluster."""
    return jax.process_index() == 0


@contextmanager
def _together() -> Iterator[None]:
    """Raise BackendError if a collective fails, because another process has ended."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError for a failed compilation
        text = str(error).strip().partition("\n")[0]
        raise BackendError(f"another process of the cluster has ended: {text}") from error


def wait_for_all() -> None:
    """Wait until all processes of the cluster have called this.

    Raises:
        BackendError: If one has ended instead.
    """
    if jax.process_count() > 1:
        with _together():
            multihost_utils.process_allgather(np.int32(0))


def whole(array: Any) -> Any:
    """Return an array with all of its shards; all processes of the cluster must call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        with _together():
            return multihost_utils.process_allgather(array, tiled=True)
    return array


def exchanged(data: bytes) -> list[bytes]:
    """Return the `data` of each process of the cluster, by process number."""
    with _together():
        sizes = multihost_utils.process_allgather(np.int32(len(data))).ravel()
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]
