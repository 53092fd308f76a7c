"""The sharded programs compile to the collectives that their kind of parallelism requires."""

import pytest

from tests.programs.collectives import Collective, collectives
from tests.programs.sharded import MISTAKES, SHARDED

F32 = 4

#: Collectives that follow from a program's sizes: kind, bytes per device, and count.
EXPECTED = {
    "data": [("all-reduce", F32 * (1 + 16 * 32 + 32 * 8), 1)],
    "tensor": [("all-reduce", F32 * 16 * 16, 1)],
    "fsdp": [
        ("all-gather", F32 * 16 * 64, 4),
        ("all-reduce", F32 * (1 + 4 * 16 * 64), 1),
    ],
    "scanned": [
        ("all-gather", F32 * 32 * 32, 6),
        ("all-reduce", F32 * 32 * 32, 6),
        ("all-reduce", F32, 1),
    ],
    "expert": [("all-to-all", F32 * 16 * 16, 3), ("all-reduce", F32, 1)],
    "pipeline": [
        ("collective-permute", F32 * 8 * 16, 11),
        ("all-reduce", F32 * 4 * 8 * 16, 1),
    ],
    "explicit": [("all-reduce", F32 * 16 * 16, 1), ("all-gather", F32 * 32 * 16, 1)],
    "partly_manual": [("all-reduce", F32 * 16 * 16, 1), ("all-reduce", F32 * 16, 1)],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_has_the_collectives_that_its_sizes_imply(name):
    found = collectives(SHARDED[name]().compiled().as_text())
    assert found == {Collective(kind, size): count for kind, size, count in EXPECTED[name]}


@pytest.mark.parametrize("name", SHARDED)
def test_each_program_communicates(name):
    assert collectives(SHARDED[name]().compiled().as_text())


#: The collective that each mistake causes.
CAUSED = {
    "missing_constraint": ("all-gather", F32 * 64 * 32, 1),
    "replicated_embedding": ("all-reduce", F32 * (1 + 4096 * 32 + 32 * 32), 1),
    "gathered_in_loop": ("all-gather", F32 * 64 * 32, 12),
    "reshaped_batch": ("all-to-all", F32 * 8 * 3 * 32, 1),
}


@pytest.mark.parametrize("name", CAUSED)
def test_a_mistake_causes_the_most_expensive_collective(name):
    kind, size, count = CAUSED[name]
    found = collectives(MISTAKES[name]().compiled().as_text())
    assert found[Collective(kind, size)] == count
    assert max(found, key=lambda each: each.bytes * found[each]) == (kind, size)
