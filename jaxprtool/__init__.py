"""jaxprtool: show, rewrite and run jaxprs, the intermediate language of JAX.

Public names are imported when they are first used, so that `import jaxprtool` does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxprtool.ir.documents import METHODS

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import cost
    from jaxprtool.analysis.diff import diff
    from jaxprtool.analysis.lint import lint
    from jaxprtool.analysis.memory import memory
    from jaxprtool.analysis.slices import flow_path, why
    from jaxprtool.api.investigate.bench import bench
    from jaxprtool.api.investigate.compare import compare
    from jaxprtool.api.investigate.compiled_memory import compiled_memory
    from jaxprtool.api.investigate.determinism import determinism
    from jaxprtool.api.investigate.gradient import why_gradient
    from jaxprtool.api.investigate.precision import precision
    from jaxprtool.api.investigate.profile import profile, profiling
    from jaxprtool.api.investigate.reduction import reduce
    from jaxprtool.api.investigate.residuals import residuals
    from jaxprtool.api.investigate.shardings import shardings
    from jaxprtool.api.investigate.source import source
    from jaxprtool.api.jit import jit
    from jaxprtool.api.program import load, make_jaxpr, trace, unzip, xla_computation
    from jaxprtool.api.record import record
    from jaxprtool.api.vmap import vmap
    from jaxprtool.execute.nans import find_nan
    from jaxprtool.execute.verify import verify
    from jaxprtool.execute.watch import watch
    from jaxprtool.formats.jaxpr.read import read
    from jaxprtool.formats.jaxpr.write import write
    from jaxprtool.formats.python.emit import python_rules, to_python
    from jaxprtool.ir.backends import clear_caches
    from jaxprtool.ir.equivalence import equivalent
    from jaxprtool.ir.frames import frames
    from jaxprtool.ir.program import Program, Programs
    from jaxprtool.ir.ragged import Ragged
    from jaxprtool.loading.example import example, static
    from jaxprtool.passes.cleanup.dce import dce_jaxpr
    from jaxprtool.passes.framework.base import Pass
    from jaxprtool.passes.framework.pipeline import Pipeline, register
    from jaxprtool.passes.mapping.batch import batch_jaxpr
    from jaxprtool.passes.patterns import Rewrite, rewrite
    from jaxprtool.primitives import nest, sow, variable
    from jaxprtool.sizes.mask import mask
    from jaxprtool.sizes.shapecheck import shapecheck

_HOME = {
    "Pass": "jaxprtool.passes.framework.base",
    "Pipeline": "jaxprtool.passes.framework.pipeline",
    "Program": "jaxprtool.ir.program",
    "Programs": "jaxprtool.ir.program",
    "Ragged": "jaxprtool.ir.ragged",
    "Rewrite": "jaxprtool.passes.patterns",
    "batch_jaxpr": "jaxprtool.passes.mapping.batch",
    "bench": "jaxprtool.api.investigate.bench",
    "clear_caches": "jaxprtool.ir.backends",
    "compare": "jaxprtool.api.investigate.compare",
    "compiled_memory": "jaxprtool.api.investigate.compiled_memory",
    "cost": "jaxprtool.analysis.cost",
    "dce_jaxpr": "jaxprtool.passes.cleanup.dce",
    "determinism": "jaxprtool.api.investigate.determinism",
    "diff": "jaxprtool.analysis.diff",
    "equivalent": "jaxprtool.ir.equivalence",
    "example": "jaxprtool.loading.example",
    "find_nan": "jaxprtool.execute.nans",
    "flow_path": "jaxprtool.analysis.slices",
    "frames": "jaxprtool.ir.frames",
    "jit": "jaxprtool.api.jit",
    "lint": "jaxprtool.analysis.lint",
    "load": "jaxprtool.api.program",
    "make_jaxpr": "jaxprtool.api.program",
    "mask": "jaxprtool.sizes.mask",
    "memory": "jaxprtool.analysis.memory",
    "nest": "jaxprtool.primitives",
    "precision": "jaxprtool.api.investigate.precision",
    "profile": "jaxprtool.api.investigate.profile",
    "profiling": "jaxprtool.api.investigate.profile",
    "python_rules": "jaxprtool.formats.python.emit",
    "read": "jaxprtool.formats.jaxpr.read",
    "record": "jaxprtool.api.record",
    "reduce": "jaxprtool.api.investigate.reduction",
    "register": "jaxprtool.passes.framework.pipeline",
    "residuals": "jaxprtool.api.investigate.residuals",
    "shardings": "jaxprtool.api.investigate.shardings",
    "rewrite": "jaxprtool.passes.patterns",
    "shapecheck": "jaxprtool.sizes.shapecheck",
    "sow": "jaxprtool.primitives",
    "source": "jaxprtool.api.investigate.source",
    "static": "jaxprtool.loading.example",
    "to_python": "jaxprtool.formats.python.emit",
    "trace": "jaxprtool.api.program",
    "unzip": "jaxprtool.api.program",
    "variable": "jaxprtool.primitives",
    "verify": "jaxprtool.execute.verify",
    "vmap": "jaxprtool.api.vmap",
    "watch": "jaxprtool.execute.watch",
    "why": "jaxprtool.analysis.slices",
    "why_gradient": "jaxprtool.api.investigate.gradient",
    "write": "jaxprtool.formats.jaxpr.write",
    "xla_computation": "jaxprtool.api.program",
}

__all__ = [
    "Pass",
    "Pipeline",
    "Program",
    "Programs",
    "Ragged",
    "Rewrite",
    "batch_jaxpr",
    "bench",
    "clear_caches",
    "compare",
    "compiled_memory",
    "cost",
    "dce_jaxpr",
    "determinism",
    "diff",
    "equivalent",
    "example",
    "find_nan",
    "flow_path",
    "frames",
    "jit",
    "lint",
    "load",
    "make_jaxpr",
    "mask",
    "memory",
    "nest",
    "precision",
    "profile",
    "profiling",
    "python_rules",
    "read",
    "record",
    "reduce",
    "register",
    "residuals",
    "rewrite",
    "shapecheck",
    "shardings",
    "source",
    "sow",
    "static",
    "to_python",
    "trace",
    "unzip",
    "variable",
    "verify",
    "vmap",
    "watch",
    "why",
    "why_gradient",
    "write",
    "xla_computation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxprtool' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


#: Where the methods of values are that need the rooms above them: the module and the function.
_METHODS = {
    "apply": ("jaxprtool.api.methods", "applied"),
    "meshes_in": ("jaxprtool.ir.mesh_sizes", "meshes_in"),
    "on_mesh": ("jaxprtool.ir.mesh_sizes", "on_mesh"),
    "origin_of": ("jaxprtool.api.methods", "origin_of"),
    "program_html": ("jaxprtool.api.methods", "html"),
    "program_summary": ("jaxprtool.api.methods", "summary"),
    "program_text": ("jaxprtool.api.methods", "text"),
    "result_html": ("jaxprtool.api.printed_results", "html"),
    "result_text": ("jaxprtool.api.printed_results", "text"),
    "specialized": ("jaxprtool.ir.specialization", "specialized"),
}


def _imported_when_called(module: str, name: str) -> Any:
    def call(*arguments: Any) -> Any:
        return getattr(import_module(module), name)(*arguments)

    return call


METHODS.update({method: _imported_when_called(*where) for method, where in _METHODS.items()})


def load_ipython_extension(shell: Any) -> None:
    """Add `%%record` to a notebook; IPython calls this for `%load_ext jaxprtool`."""
    import_module("jaxprtool.api.notebook").register(shell)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
