"""JAX's own test programs as cases: their number, and the sample of a tenth."""

import subprocess
import sys

import jax
import numpy as np

from tests import share
from tests.programs import harness_programs, harness_share, skipped_harnesses
from tests.programs.harnesses import _case, _harnesses


def test_every_program_is_a_case_or_skipped_for_one_of_jaxs_reasons():
    cases = harness_programs(every=1)
    assert len(cases) + skipped_harnesses().total() == len(_harnesses())
    assert len(cases) > 5300
    assert len({case.name for case in cases}) == len(cases)


def test_skipped_programs_are_those_not_implemented_on_the_cpu():
    skipped = skipped_harnesses()
    assert 1 < skipped.total() < 200
    assert all(reason.startswith("unimplemented: ") for reason in skipped), skipped


def groups(names):
    return {h.group_name for h in _harnesses() if h.fullname in names}


def test_a_tenth_has_programs_of_every_group():
    tenth = {case.name for case in harness_programs()}
    assert groups(tenth) == groups({case.name for case in harness_programs(every=1)})
    assert 548 <= len(tenth) <= 700


def test_two_releases_split_the_tenth_and_each_has_programs_of_every_group(monkeypatch):
    halves = []
    for half in (0, 1):
        monkeypatch.setattr(share, "HALF", half)
        halves.append({case.name for case in harness_share()})
    tenth = {case.name for case in harness_programs()}
    assert halves[0] | halves[1] == tenth
    assert groups(halves[0]) == groups(halves[1]) == groups(tenth)
    assert max(map(len, halves)) < 0.65 * len(tenth)


def test_the_tenth_is_the_same_in_every_process():
    code = "from tests.programs import harness_programs as h; print([c.name for c in h()])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == f"{[c.name for c in harness_programs()]}\n"


def test_a_case_traces_and_has_the_same_arguments_each_time():
    first = harness_programs()[7]
    _case.cache_clear()
    again = harness_programs()[7]
    program = first.program()
    assert len(program.jaxpr.invars) == len(first.arguments())
    for a, b in zip(first.arguments(), again.arguments(), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_importing_the_programs_does_not_import_the_harnesses():
    code = "import sys, tests.programs; print('jax._src.internal_test_util' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_the_harnesses_do_not_change_jaxs_configuration():
    harness_programs()
    assert not jax.config.jax_enable_x64
    assert len(jax.devices("cpu")) == 8
