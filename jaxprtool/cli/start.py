"""How a command starts JAX, which is imported only once the command line is known to be right."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator

from jaxprtool.cli import output
from jaxprtool.cli.progress import Told


def start_jax(told: Told, x64: bool = False) -> None:
    """Import JAX, configured as asked for, and say so if it is one that we do not know."""
    told("importing JAX")
    # What is imported stays, and need not be gone through by the garbage collector meanwhile.
    gc.disable()
    with _interrupts_held_back():
        import jax

        import jaxprtool.api.program  # noqa: F401  (what most commands need)
        from jaxprtool import jaxcompat
    gc.freeze()
    gc.enable()
    for path in _own_frames():
        jaxcompat.hide_frames(path)
    jaxcompat.keep_backend_probing_quiet()
    if x64:
        jax.config.update("jax_enable_x64", True)
    if version := jaxcompat.untested_version():
        output.warning(f"jaxprtool has not been tested with JAX {version}")


def use_cache(wanted: bool) -> None:
    """Have JAX keep what it compiles in the user's cache folder, or not look at any cache."""
    from jaxprtool.execute import compile_cache

    if not wanted:
        compile_cache.compile_afresh()
        return
    try:
        compile_cache.keep_compiled()
    except OSError as error:
        output.warning(f"compiled programs are not kept: {error.strerror or error}")


def _own_frames() -> Iterator[str]:
    """What stands on the stack below a command: Typer, Click, and what has started Python.

    JAX would take them for code of the user's, and list them as sources of the HLO.
    """
    for name in ("typer", "click"):
        if file := getattr(sys.modules.get(name), "__file__", None):
            yield os.path.join(os.path.dirname(file), "")
    yield "<frozen "
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.basename(script).partition(".")[0] == "jaxprtool":
        yield script


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back: JAX's extension modules crash if it cuts their import short."""
    held: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    except ValueError:  # only the main thread may; another one is not interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt
