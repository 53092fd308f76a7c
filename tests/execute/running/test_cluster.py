"""A process finds out that it is one of a cluster, and does not wait for ever for a coordinator."""

import socket

import pytest

from jaxprtool.errors import BackendError
from jaxprtool.execute.running.cluster import is_started_by_cluster, join
from jaxprtool.processes.group import Place


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
def test_schedulers_are_known_by_their_variables(env, started):
    assert is_started_by_cluster(env) is started


def test_a_coordinator_that_never_answers_is_one_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but it does not listen
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"{address} did not answer within 1 s") as raised:
            join(Place(address, 2, 1), seconds=1)
    assert "--process-id 0" in raised.value.hint
