"""The start of JAX, which is imported only after the command line has been validated."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from glob import glob
from importlib.util import find_spec

from jaxprtool.cli import output
from jaxprtool.cli.output import OnProgress
from jaxprtool.errors import BackendError

#: Called when the command has ended.
_at_end: ContextVar[contextlib.ExitStack] = ContextVar("_at_end")

#: Called with True if a command wants another number of devices than is set, and with False after a
#: command whose number stays, because JAX has started its devices.
on_other_devices: ContextVar[Callable[[bool], object]] = ContextVar(
    "on_other_devices", default=lambda is_late: None
)


@contextlib.contextmanager
def jax_settings_restored() -> Iterator[None]:
    """Restore JAX's configuration after a command, since other code may run in this process."""
    with contextlib.ExitStack() as stack:
        token = _at_end.set(stack)
        try:
            yield
        finally:
            _at_end.reset(token)


def until_the_end(context: contextlib.AbstractContextManager[object]) -> None:
    """Enter a context that is left when the command has ended."""
    _at_end.get().enter_context(context)


def _restore_at_end(*settings: str) -> None:
    import jax

    for name in settings:
        _at_end.get().callback(_restore, name, jax.config.values[name])


def _restore(name: str, value: object) -> None:
    import jax

    try:
        jax.config.update(name, value)
    except RuntimeError:  # the number of devices stays once they have started
        on_other_devices.get()(False)


def start_jax(on_progress: OnProgress, x64: bool = False) -> None:
    """Import and configure JAX, and warn about an unknown release."""
    on_progress("importing JAX")
    _keep_libtpu_quiet()
    with _interrupts_delayed(), _imports_frozen():
        from jaxprtool import jaxcompat
    for path in _own_frames():
        jaxcompat.hide_frames(path)
    jaxcompat.keep_backend_probing_quiet()
    if x64:
        use_x64(True)
    if version := jaxcompat.untested_version():
        output.warning(f"jaxprtool has not been tested with JAX {version}")


#: What keeps libtpu from asking a cloud's metadata server for the TPU, from complaining, and from
#: refusing to compile in two processes.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def _keep_libtpu_quiet() -> None:
    """Set the environment of libtpu where it only compiles, on a machine without a TPU."""
    if find_spec("libtpu") is None or glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"):
        return
    for variable, value in _NO_TPU.items():
        os.environ.setdefault(variable, value)


def uses_x64() -> bool:
    """Return whether JAX's 64-bit types are enabled."""
    from jaxprtool.ir import dtypes

    return dtypes.x64_enabled()


def use_x64(enabled: bool) -> None:
    """Enable or disable JAX's 64-bit types from now on."""
    import jax

    _restore_at_end("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)


def use_host_devices(count: int) -> None:
    """Use this many virtual devices of the CPU, and no other devices.

    Raises BackendError if JAX has started its devices.
    """
    import jax

    _restore_at_end("jax_platforms", "jax_num_cpu_devices")
    try:
        if jax.config.values["jax_num_cpu_devices"] != count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        raise BackendError(
            f"--host-devices {count} comes too late: JAX has started its devices",
            "start JAX's devices neither in a plug-in nor before this command",
        ) from None
    jax.config.update("jax_platforms", "cpu")


def use_virtual_devices(count: int) -> None:
    """Let the CPU have this many virtual devices, beside the devices of the machine.

    A number that the environment or a module has set is kept, and so are devices that have started.
    """
    import jax

    _restore_at_end("jax_num_cpu_devices")
    is_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    configured = jax.config.values["jax_num_cpu_devices"]
    if configured != count:
        on_other_devices.get()(True)
    with contextlib.suppress(RuntimeError):  # JAX has started its devices
        if configured in (-1, count):
            jax.config.update("jax_num_cpu_devices", -1 if is_flag else count)


def use_cache(wanted: bool) -> None:
    """Enable JAX's compilation cache in the user's cache folder, or disable it."""
    from jaxprtool.execute.running import backends

    _at_end.get().callback(backends.forget)
    _restore_at_end(*backends.SETTINGS)
    if not wanted:
        backends.compile_afresh()
        return
    try:
        backends.keep_compiled()
    except OSError as error:
        output.warning(f"compiled programs are not cached: {error.strerror or error}")


def _own_frames() -> Iterator[str]:
    """Yield the files on the stack below a command: Typer, Click, and Python's entry point.

    JAX would treat them as user code, and list them as sources of the HLO.
    """
    for name in ("typer", "click"):
        if file := getattr(sys.modules.get(name), "__file__", None):
            yield os.path.join(os.path.dirname(file), "")
    yield "<frozen "
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.basename(script).partition(".")[0] == "jaxprtool":
        yield script


@contextlib.contextmanager
def _imports_frozen() -> Iterator[None]:
    """Pause the garbage collector during the first import of JAX, whose objects stay alive."""
    if "jaxprtool.jaxcompat" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C: JAX's extension modules crash if their import is interrupted."""
    delayed: list[int] = []
    try:
        handler = signal.signal(signal.SIGINT, lambda number, frame: delayed.append(number))
    except ValueError:  # only possible in the main thread; others are not interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if delayed:
        raise KeyboardInterrupt
