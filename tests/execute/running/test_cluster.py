"""A process detects that it belongs to a cluster, and waits for a coordinator with a timeout."""

import socket

import pytest

from jaxprtool.errors import BackendError
from jaxprtool.execute.running.backends import is_started_by_cluster, join
from jaxprtool.processes import ClusterPlace


@pytest.mark.parametrize(
    ("env", "started"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # a script of a job, outside of srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
    ],
)
def test_schedulers_are_detected_by_their_variables(env, started):
    assert is_started_by_cluster(env) is started


def test_an_unresponsive_coordinator_is_a_one_line_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"{address} did not answer within 1 s") as raised:
            join(ClusterPlace(address, 2, 1), seconds=1)
    assert "--process-id 0" in raised.value.hint
