"""The samples are within the budgets of our own pyproject.toml."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("processes")
def test_the_samples_pass_the_check_of_this_repository():
    command = [sys.executable, "-m", "jaxprtool", "check", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    targets = json.loads(ended.stdout)["targets"]
    assert len(targets) >= 7 and all(each["passed"] for each in targets)
    measured = {quantity for each in targets for quantity in each["measured"]}
    assert {"flops", "peak_bytes", "residual_bytes", "collectives_bytes", "compiles"} <= measured
