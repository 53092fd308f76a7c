"""Run pages as if nothing had run in this process before."""

import sys
from pathlib import Path

import jax
import pytest

import jaxprtool
from jaxprtool.passes.framework import registry
from tests.documentation.blocks import ROOT


def forget(folder=ROOT / "samples"):
    """Forget the modules of a folder, their traces, and their registrations."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and Path(path).resolve().parent == folder:
            del sys.modules[name]
    jax.clear_caches()
    jaxprtool.clear_caches()
    registry._registered.clear()


@pytest.fixture(scope="module", autouse=True)
def as_in_a_fresh_process():
    registered = dict(registry._registered)
    forget()
    yield
    forget()
    registry._registered.update(registered)
