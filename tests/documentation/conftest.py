"""Run pages as if nothing had run in this process before."""

import functools
import os
import sys

import jax
import pytest

import jaxprtool
from jaxprtool import passes as framework
from tests.documentation.blocks import ROOT

#: The folder without symbolic links, of each folder that has modules.
_real = functools.cache(os.path.realpath)


def forget(folder=ROOT / "samples"):
    """Forget the modules of a folder, their traces, and their registrations."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and _real(os.path.dirname(path)) == str(folder):
            del sys.modules[name]
    jax.clear_caches()
    jaxprtool.clear_caches()
    framework._registered.clear()


@pytest.fixture(scope="module", autouse=True)
def as_in_a_fresh_process():
    registered = dict(framework._registered)
    forget()
    yield
    forget()
    framework._registered.update(registered)
