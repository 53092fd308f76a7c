"""What changes for the models from one JAX release to another is named by line.

The interpreter of the other environment, which has the models too, is in
`JAXPRTOOL_UPGRADE_PYTHON`.
"""

import os
import sys

import pytest

from jaxprtool.commands.upgrade import upgraded
from jaxprtool.ir.source_text import UNKNOWN
from tests.models.commands import BEFORE_FILES
from tests.models.test_models import NAMES

OTHER = os.environ.get("JAXPRTOOL_UPGRADE_PYTHON", "")

#: What an environment says of a model whose package it does not have, or not for its JAX.
NOT_INSTALLED = ("ModuleNotFoundError", "ImportError")


@pytest.mark.sweep
@pytest.mark.models
@pytest.mark.skipif(not OTHER, reason="JAXPRTOOL_UPGRADE_PYTHON names no other environment")
@pytest.mark.parametrize("name", NAMES)
def test_what_another_release_changes_has_a_line(name):
    target = f"tests.models.zoo.{name}:model"
    passes = BEFORE_FILES.get(name)
    (change,) = upgraded([target], OTHER, sys.executable, passes=passes, factory=True).targets
    if any(error in change.error for error in NOT_INSTALLED) and "jaxprtool" not in change.error:
        pytest.skip(change.error)
    assert not change.error
    assert change.values in ("the same bits", "within rounding"), change.differing_results
    assert change.modules is not None
    assert change.begins or change.modules.is_same
    for number, whole in enumerate((change.modules.before, change.modules.after)):
        own = [
            (row.before, row.after)[number] for row in change.modules.lines if row.place == UNKNOWN
        ]
        assert sum(figures.bytes for figures in own) <= 0.1 * whole.bytes
