"""Start recording when this Python process imports JAX. It imports nothing of jaxprtool before.

Python imports `sitecustomize` at its start. `launch` puts this folder on PYTHONPATH. Another module
of that name on the path is imported too.
"""

import os
import sys


def _import_hidden() -> None:
    """Import the `sitecustomize` that this one hides, without this folder on the path."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    sys.modules.setdefault("sitecustomize", this)


class _AfterJax:
    """A finder of modules that starts recording once the import of JAX is complete."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "jax":
            return None
        import importlib.util

        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
            return spec
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            _begin()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    """Start recording; if that fails, say so in one line and let the script go on."""
    import gc

    # Imported objects live on: to search them and those of JAX for garbage takes as long as this.
    enabled = gc.isenabled()
    gc.disable()
    try:
        from jaxprtool.recording.recorder import begin

        begin()
    except Exception as error:
        lacks = isinstance(error, ModuleNotFoundError) and error.name == "jaxprtool"
        fault = "it has no jaxprtool" if lacks else f"{type(error).__name__}: {error}"
        print(f"jaxprtool: {sys.executable} is not recorded: {fault}", file=sys.stderr)
    finally:
        if enabled:
            gc.enable()


if "JAXPRTOOL_RECORD" in os.environ:
    sys.meta_path.insert(0, _AfterJax())  # type: ignore[arg-type]
_import_hidden()
