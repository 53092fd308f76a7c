import gc
import os
import sys
import time

import pytest

from jaxprtool.ir import process
from jaxprtool.ir.process import OtherPrograms

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts CPU times in /proc")


@pytest.mark.proof
@on_linux
def test_the_work_of_this_process_is_not_that_of_other_programs(monkeypatch):
    def both():
        others = process._cpu_seconds()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process has this number
            return others, process._cpu_seconds()

    others, everyone = both()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    others_later, everyone_later = both()
    ours = (everyone_later - everyone) - (others_later - others)
    assert ours == pytest.approx(0.3, abs=0.15)


@on_linux
def test_the_cpus_of_other_programs_are_a_number_after_a_while():
    others = OtherPrograms()
    time.sleep(process._LEAST_SECONDS)
    assert 0 <= others.cpus() <= os.cpu_count() + 1


def test_a_time_too_short_to_count_is_unknown():
    assert OtherPrograms().cpus() is None


def test_a_system_that_does_not_count_says_nothing(monkeypatch):
    monkeypatch.setattr(process, "_cpu_seconds", lambda: None)
    monkeypatch.setattr(process, "_LEAST_SECONDS", 0.0)
    assert OtherPrograms().cpus() is None


# --- collector --------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "during"), [(700, 20_000), (0, 0), (10**6, 10**6)])
def test_the_collector_runs_rarely_during_a_command(own, during):
    before = gc.get_threshold()
    gc.set_threshold(own)
    try:
        with process.rare_collections():
            assert gc.get_threshold()[0] == during
        assert gc.get_threshold()[0] == own
    finally:
        gc.set_threshold(*before)
