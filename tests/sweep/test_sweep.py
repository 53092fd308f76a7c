"""The sweep itself: shares, saved results, and processes that die or hang."""

from __future__ import annotations

import pytest

from tests.programs.harnesses import harness_programs
from tests.share import on_one_release
from tests.sweep import fakes
from tests.sweep.__main__ import failure, table, tasks_of
from tests.sweep.corpora import Harnesses, RandomPrograms
from tests.sweep.parts import MarkedTests, Part, find_parts
from tests.sweep.runner import Runner, State
from tests.sweep.worker import drawn_units, is_drawn

(NUMBERS,) = fakes.parts()


class Everything:
    """A log that selects and keeps everything."""

    def __init__(self):
        self.results = []

    def wants(self, program):
        return True

    def started(self, program):
        pass

    def done(self, result):
        self.results.append(result)


def run(part, tmp_path, **options):
    state = State(tmp_path / "state.jsonl")
    runner = Runner(state, "tests.sweep.fakes:parts", **options)
    runner.run(tasks_of(part, 1.0, 0))
    return {program: (r.kind, r.error) for (_, program), r in state.results.items()}


@on_one_release
def test_a_process_that_dies_fails_its_program_and_the_rest_is_run(tmp_path):
    results = run(NUMBERS, tmp_path, jobs=1)
    kind, error = results.pop("3")
    assert kind == "failed"
    assert "three is wrong" in error and 'raise ValueError("three is wrong")' in error
    assert results == {
        **dict.fromkeys("02468", ("passed", "")),
        "1": ("refused", ""),
        "5": ("failed", "the process ended with 7"),
        "7": ("passed", ""),
    }


@pytest.mark.sweep
def test_a_program_that_takes_too_long_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("SLEEP", "600")
    results = run(NUMBERS, tmp_path, jobs=2, patience=5)
    assert results["7"] == ("failed", "nothing heard for 5 s")
    assert results["8"] == ("passed", "")


def test_saved_results_are_not_run_again(tmp_path):
    log = Everything()
    NUMBERS.run("0", log)
    state = State(tmp_path / "state.jsonl")
    for result in log.results:
        state.add(result)
    with state.path.open("a") as file:
        file.write('{"part": "numb')  # the run was killed here
    again = State(state.path)
    assert again.results == state.results
    assert again.done("numbers") == {"0", "1", "2"}
    assert "| numbers | 3 | 2 | 1 | 0 | 0 |" in table(again.results.values())


def test_a_failure_is_reported_with_the_command_that_reproduces_it():
    log = Everything()
    log.wants = "3".__eq__
    NUMBERS.run("3", log)
    (failed,) = log.results
    assert "--only 'numbers' --program '3'" in failure(failed)
    with pytest.raises(ValueError, match="three"):
        NUMBERS.run_alone("3")


def test_larger_shares_contain_smaller_ones():
    names = [str(i) for i in range(1000)]
    shares = [{n for n in names if is_drawn("part", n, share, 3)} for share in (0.1, 0.3, 1)]
    assert shares[0] < shares[1] < shares[2] == set(names)
    assert 60 < len(shares[0]) < 140
    assert shares[0] != {n for n in names if is_drawn("part", n, 0.1, 4)}
    units = names[:7]
    assert len(drawn_units("part", units, 0.01, 3)) == 1
    assert set(drawn_units("part", units, 0.3, 3)) < set(drawn_units("part", units, 0.6, 3))


@pytest.mark.sweep
def test_units_contain_each_program_once():
    names = []
    harnesses = Harnesses()
    for unit in harnesses.units():
        harnesses.visit(unit, lambda name: True, lambda name, number, case: names.append(name))
    assert sorted(names) == sorted(case.name for case in harness_programs(1))


def test_a_random_program_is_the_same_when_drawn_alone():
    corpus, seen = RandomPrograms(4), {}

    def visit(name, number, case):
        seen.setdefault(name, []).append((number, str(case.program().jaxpr)))

    corpus.visit("100", lambda name: True, visit)
    for name in list(seen):
        corpus.visit("100", lambda other, name=name: other == name, visit)
    assert len(seen) == 4
    assert all(first == second for first, second in seen.values())


def test_every_part_is_found():
    parts = find_parts()
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    for word in ("dce", "rewriting", "batch", "unzip", "behind -O2", "files", "python"):
        assert any(name.startswith(f"{word}: ") for name in names), word
    assert {type(part) for part in parts} == {Part, MarkedTests}


@on_one_release
def test_a_process_with_full_memory_is_replaced_by_another(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_MOST_BYTES", "1")
    assert len(run(NUMBERS, tmp_path, jobs=1)) == 9
