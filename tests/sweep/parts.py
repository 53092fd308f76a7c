"""The parts of the sweep: a proof, its programs, and their outcomes."""

from __future__ import annotations

import importlib
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from tests.sweep.corpora import Corpus

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """The outcome of one program: "passed", "refused" (as the proof expects) or "failed"."""

    part: str
    program: str
    kind: str
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    error: str = ""


class Log(Protocol):
    """An observer of a unit of work, which selects programs."""

    def wants(self, program: str) -> bool: ...

    def started(self, program: str) -> None: ...

    def done(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Part:
    """A proof over a corpus.

    `prove(number, case)` returns an outcome, or counts of them, or raises. An outcome that starts
    with one of `refusals` is an expected refusal. `expected` checks the sums of outcomes over the
    whole corpus, so that a proof that proves nothing fails.
    """

    name: str
    corpus: Corpus
    prove: Callable[[int, Any], Counter[str] | str | int | None]
    refusals: tuple[str, ...] = ("refused",)
    expected: Callable[[Counter[str]], bool] = Counter.total

    @property
    def whole(self) -> bool:
        return self.corpus.whole

    def units(self) -> list[str]:
        return self.corpus.units()

    def run(self, unit: str, log: Log) -> None:
        """Prove the programs of a unit that the log selects."""

        def visit(name: str, number: int, case: Any) -> None:
            log.started(name)
            log.done(self._result(name, number, case))

        self.corpus.visit(unit, log.wants, visit)

    def _result(self, name: str, number: int, case: Any) -> Result:
        start = time.perf_counter()
        try:
            outcomes = _counted(self.prove(number, case))
        except Exception as error:
            return Result(
                self.name, name, "failed", time.perf_counter() - start, error=_described(error)
            )
        refused = any(outcome.startswith(self.refusals) for outcome in outcomes)
        kind = "refused" if refused else "passed"
        return Result(self.name, name, kind, time.perf_counter() - start, outcomes)

    def run_alone(self, program: str) -> None:
        """Prove one program in this process. Its errors are raised."""

        def visit(name: str, number: int, case: Any) -> None:
            print(f"{self.name}: {name}, number {number}", flush=True)
            print(self.prove(number, case))

        for unit in self.units():
            self.corpus.visit(unit, lambda name: name == program, visit)


def _counted(outcome: Counter[str] | str | int | None) -> dict[str, int]:
    if isinstance(outcome, Counter):
        return {str(key): count for key, count in outcome.items() if count}
    return {} if outcome is None else {str(outcome): 1}


def _described(error: BaseException) -> str:
    """Return an error with its notes and the line of the test that raised it."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(map(_described, error.exceptions))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = [f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames[-3:]]
    notes = getattr(error, "__notes__", [])
    return "\n".join([f"{type(error).__name__}: {error}"[:1500], *notes, *where])


@dataclass(frozen=True)
class MarkedTests:
    """The tests of one file that are marked `sweep`; each counts as a program."""

    whole: ClassVar[bool] = False
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def expected(self, outcomes: Counter[str]) -> bool:
        """Return True: tests of this kind have no outcomes to check."""
        return True

    def units(self) -> list[str]:
        return ["all"]

    def run(self, unit: str, log: Log) -> None:
        """Run the tests that the log selects."""
        code = self._pytest("-p", "no:terminal", plugins=[_Reporter(self.name, log)])
        if code not in (0, 1, 5):  # all passed, some failed, none selected
            log.done(Result(self.name, "(all)", "failed", error=f"pytest ends with {code!r}"))

    def run_alone(self, program: str) -> None:
        """Run one test in this process, with pytest's report."""
        raise SystemExit(self._pytest(program=program))

    def _pytest(self, *options: str, program: str | None = None, plugins: Any = ()) -> Any:
        target = self.name if program is None else f"{self.name}::{program}"
        common = ("-o", "addopts=", "--import-mode=importlib", "-m", "sweep and not models")
        return pytest.main([f"--rootdir={ROOT}", *common, *options, str(ROOT / target)], plugins)


class _Reporter:
    """Passes pytest's reports of each test on to a log."""

    def __init__(self, part: str, log: Log):
        self.part, self.log = part, log
        self.failures: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.skipped: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self.log.wants(_short(item.nodeid))]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.log.started(_short(nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = _short(report.nodeid)
        self.seconds[name] += report.duration
        if report.failed:
            self.failures[name] = report.longreprtext[-3000:]
        elif report.skipped:
            self.skipped.add(name)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = _short(nodeid)
        error = self.failures.get(name, "")
        kind = "failed" if error else "refused" if name in self.skipped else "passed"
        self.log.done(Result(self.part, name, kind, self.seconds[name], error=error))


def _short(nodeid: str) -> str:
    return nodeid.partition("::")[2]


#: The mark, and what adds it in `tests/share.py`.
_SWEEPS = re.compile(r"mark\.sweep|\b(for_sweep_unless|on_one_release|shared_proofs)\b")


def find_parts() -> list[Part | MarkedTests]:
    """Return every part: those of the lists named `SWEEP`, and the files with marked tests."""
    parts: list[Part | MarkedTests] = []
    for path in sorted((*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/**/test_*.py"))):
        text = path.read_text()
        if re.search(r"^SWEEP\b", text, re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            parts += importlib.import_module(module).SWEEP
        if _SWEEPS.search(text) and "models" not in path.parts:
            parts.append(MarkedTests(path))
    return parts
