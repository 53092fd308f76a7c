"""jaxprtool: show, rewrite and run jaxprs, the intermediate language of JAX.

Public names are those of `__init__.pyi`. They are imported when they are first used, so that
`import jaxprtool` does not import JAX.
"""

from importlib import import_module
from typing import Any

import lazy_loader

from jaxprtool.ir.documents import METHODS

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


#: Where the methods of values are that need the rooms above them: the module and the function.
_METHODS = {
    "apply": ("jaxprtool.api", "applied"),
    "meshes_in": ("jaxprtool.ir.substitution", "meshes_in"),
    "on_mesh": ("jaxprtool.ir.specialization", "on_mesh"),
    "origin_of": ("jaxprtool.commands.nans.search", "origin_of"),
    "program_html": ("jaxprtool.api", "program_html"),
    "program_summary": ("jaxprtool.api", "program_summary"),
    "program_text": ("jaxprtool.api", "program_text"),
    "result_html": ("jaxprtool.registry", "result_html"),
    "result_text": ("jaxprtool.registry", "result_text"),
    "specialized": ("jaxprtool.ir.specialization", "specialized"),
    "summarize_run": ("jaxprtool.commands.record.record", "summarize_run"),
}


def _imported_when_called(module: str, name: str) -> Any:
    def call(*arguments: Any) -> Any:
        return getattr(import_module(module), name)(*arguments)

    return call


METHODS.update({method: _imported_when_called(*where) for method, where in _METHODS.items()})


def load_ipython_extension(shell: Any) -> None:
    """Add `%%record` to a notebook; IPython calls this for `%load_ext jaxprtool`."""
    import_module("jaxprtool.commands.record.notebook").register_magics(shell)
