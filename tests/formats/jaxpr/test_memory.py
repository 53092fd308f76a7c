"""Large constants need no more memory than necessary, measured by the peaks of processes."""

import gc
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest

from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.loading.trace import trace

TABLE = np.arange(100, dtype=np.float32)
MEASURED = """
import resource, sys
import jaxprtool

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large = sys.argv[1:]
assert jaxprtool.equivalent(jaxprtool.read(small), jaxprtool.read(small))
before = peak()
program = jaxprtool.read(large)
print(peak() - before)
assert jaxprtool.equivalent(program, jaxprtool.read(large))
print(peak() - before)
"""


def megabytes_of_constants(count):
    table = np.frombuffer(np.random.RandomState(0).bytes(1 << 20) * count, np.float32)
    return trace(lambda x: x * table, np.float32(1))


def check(folder, count):
    for name, size in (("small", 1), ("large", count)):
        write(megabytes_of_constants(size), folder / f"{name}.jaxpr")
    command = [sys.executable, "-c", MEASURED, folder / "small.jaxpr", folder / "large.jaxpr"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    read, compared = (int(line) / (count << 20) for line in done.stdout.split())
    assert read <= 0.2 and compared <= 1.2, (read, compared)


@pytest.mark.usefixtures("processes")
def test_constants_are_read_and_compared_in_place(tmp_path):
    check(tmp_path, 64)


@pytest.mark.sweep
def test_a_gigabyte_of_constants_is_read_and_compared_in_place(tmp_path):
    check(tmp_path, 1024)


@pytest.mark.proof
def test_a_program_that_was_read_and_called_can_be_freed(tmp_path):
    write(trace(lambda x: jax.jit(jax.nn.gelu)(x) * TABLE, np.float32(1)), tmp_path / "p.jaxpr")
    gone = []
    for _ in range(3):
        program = read(tmp_path / "p.jaxpr")
        program(np.float32(2))
        gone.append(weakref.ref(program.jaxpr))
    del program
    gc.collect()
    assert [each() for each in gone] == [None] * 3
