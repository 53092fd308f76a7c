"""The CPU seconds of tests, as a plug-in of pytest: the dearest ones, and those that are too dear.

CPU time is that of the process and of its children that have ended, so that a loaded machine does
not decide. A test's teardown does not count, as it may clear the caches of all tests.
"""

from __future__ import annotations

import resource
import time
from collections import Counter

import pytest

#: The most CPU seconds of a test that is no proof, where suites share the cores and nothing is
#: cached. It is two on an idle machine.
LIMIT = 4.0

#: The CPU seconds of each test so far, in the process that reports, and whether it is a proof.
_seconds: Counter[tuple[str, bool]] = Counter()
#: The CPU seconds of this process at the last report.
_before = 0.0


def _now() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_runtest_logstart():
    global _before
    _before = _now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add to a report what its phase took, and whether the test is a proof."""
    global _before
    report = yield
    now = _now()
    report.cpu_seconds, _before = now - _before, now
    report.is_proof = item.get_closest_marker("proof") is not None
    return report


def pytest_runtest_logreport(report):
    if report.when != "teardown" and hasattr(report, "cpu_seconds"):  # not of a worker that died
        _seconds[report.nodeid, report.is_proof] += report.cpu_seconds


def _too_dear() -> list[str]:
    return [name for (name, is_proof), s in _seconds.items() if s > LIMIT and not is_proof]


def pytest_sessionfinish(session):
    if session.config.option.dearest and not session.exitstatus and _too_dear():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if not config.option.dearest:
        return
    terminalreporter.section("dearest tests, in CPU seconds")
    for (name, is_proof), seconds in _seconds.most_common(20):
        terminalreporter.line(f"{seconds:6.2f}  {'proof' if is_proof else '     '}  {name}")
    for name in _too_dear():
        terminalreporter.line(
            f"{name} takes more than {LIMIT:g} CPU seconds: make it cheaper, or a proof"
            " (CONTRIBUTING.md)",
            red=True,
        )
