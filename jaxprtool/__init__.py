"""jaxprtool: show, rewrite and run jaxprs, the intermediate language of JAX.

Public names are imported when they are first used, so that `import jaxprtool` does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import cost
    from jaxprtool.analysis.diff import diff
    from jaxprtool.analysis.flow_paths import flow_path
    from jaxprtool.analysis.memory import memory
    from jaxprtool.analysis.slices import why
    from jaxprtool.api.compare import compare
    from jaxprtool.api.jit import jit
    from jaxprtool.api.lower import make_jaxpr, xla_computation
    from jaxprtool.api.program import load, trace, unzip
    from jaxprtool.api.reduction import reduce
    from jaxprtool.api.residuals import residuals
    from jaxprtool.api.source import source
    from jaxprtool.api.vmap import vmap
    from jaxprtool.execute.nans import find_nan
    from jaxprtool.execute.verify import verify
    from jaxprtool.execute.watch import watch
    from jaxprtool.formats.jaxpr.read import read
    from jaxprtool.formats.jaxpr.write import write
    from jaxprtool.formats.python.emit import python_rules, to_python
    from jaxprtool.ir.caches import clear_caches
    from jaxprtool.ir.equivalence import equivalent
    from jaxprtool.ir.frame_choice import frames
    from jaxprtool.ir.program import Program, Programs
    from jaxprtool.ir.ragged import Ragged
    from jaxprtool.loading.example import example, static
    from jaxprtool.passes.base import Pass
    from jaxprtool.passes.batch.jaxprs import batch_jaxpr
    from jaxprtool.passes.dce import dce_jaxpr
    from jaxprtool.passes.patterns import Rewrite, rewrite
    from jaxprtool.passes.pipeline import Pipeline
    from jaxprtool.passes.registry import register
    from jaxprtool.primitives import nest, sow, variable
    from jaxprtool.sizes.mask import mask
    from jaxprtool.sizes.shapecheck import shapecheck

_HOME = {
    "Pass": "jaxprtool.passes.base",
    "Pipeline": "jaxprtool.passes.pipeline",
    "Program": "jaxprtool.ir.program",
    "Programs": "jaxprtool.ir.program",
    "Ragged": "jaxprtool.ir.ragged",
    "Rewrite": "jaxprtool.passes.patterns",
    "batch_jaxpr": "jaxprtool.passes.batch.jaxprs",
    "clear_caches": "jaxprtool.ir.caches",
    "compare": "jaxprtool.api.compare",
    "cost": "jaxprtool.analysis.cost",
    "dce_jaxpr": "jaxprtool.passes.dce",
    "diff": "jaxprtool.analysis.diff",
    "equivalent": "jaxprtool.ir.equivalence",
    "example": "jaxprtool.loading.example",
    "find_nan": "jaxprtool.execute.nans",
    "flow_path": "jaxprtool.analysis.flow_paths",
    "frames": "jaxprtool.ir.frame_choice",
    "jit": "jaxprtool.api.jit",
    "load": "jaxprtool.api.program",
    "make_jaxpr": "jaxprtool.api.lower",
    "mask": "jaxprtool.sizes.mask",
    "memory": "jaxprtool.analysis.memory",
    "nest": "jaxprtool.primitives",
    "python_rules": "jaxprtool.formats.python.emit",
    "read": "jaxprtool.formats.jaxpr.read",
    "reduce": "jaxprtool.api.reduction",
    "register": "jaxprtool.passes.registry",
    "residuals": "jaxprtool.api.residuals",
    "rewrite": "jaxprtool.passes.patterns",
    "shapecheck": "jaxprtool.sizes.shapecheck",
    "sow": "jaxprtool.primitives",
    "source": "jaxprtool.api.source",
    "static": "jaxprtool.loading.example",
    "to_python": "jaxprtool.formats.python.emit",
    "trace": "jaxprtool.api.program",
    "unzip": "jaxprtool.api.program",
    "variable": "jaxprtool.primitives",
    "verify": "jaxprtool.execute.verify",
    "vmap": "jaxprtool.api.vmap",
    "watch": "jaxprtool.execute.watch",
    "why": "jaxprtool.analysis.slices",
    "write": "jaxprtool.formats.jaxpr.write",
    "xla_computation": "jaxprtool.api.lower",
}

__all__ = [
    "Pass",
    "Pipeline",
    "Program",
    "Programs",
    "Ragged",
    "Rewrite",
    "batch_jaxpr",
    "clear_caches",
    "compare",
    "cost",
    "dce_jaxpr",
    "diff",
    "equivalent",
    "example",
    "find_nan",
    "flow_path",
    "frames",
    "jit",
    "load",
    "make_jaxpr",
    "mask",
    "memory",
    "nest",
    "python_rules",
    "read",
    "reduce",
    "register",
    "residuals",
    "rewrite",
    "shapecheck",
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
    "write",
    "xla_computation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxprtool' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
