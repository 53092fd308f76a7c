"""Round trips of programs through their emitted source."""

from __future__ import annotations

import ast
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.formats.python.emit import to_python
from jaxprtool.formats.python.rules_of_calls import HELPERS
from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace


def defined(source: str, file: str = "emitted.py") -> Any:
    """Return the first function that a module of this source defines, not counting helpers."""
    namespace: dict[str, Any] = {"__name__": "emitted", "__file__": file}
    exec(compile(source, file, "exec"), namespace)
    return namespace[main_name(source)]


def main_name(source: str) -> str:
    """Return the name of a module's main function."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return next(f.name for f in functions if f.name not in HELPERS)


def emitted(program: Program) -> tuple[str, Program]:
    """Return a program's source, and the trace of that, with the names of the original."""
    source = to_python(program)
    return source, traced_again(defined(source), program)


def traced_again(function: Any, program: Program) -> Program:
    """Return the trace of a function called like the program."""
    args, kwargs = jax.tree.unflatten(program.in_tree, map(_example, program.in_avals))
    with jaxcompat.axes_bound(program.axis_env):
        again = trace(function, *args, **kwargs)
    return again.replace(
        name=program.name,
        arg_names=program.arg_names,
        out_names=program.out_names,
        axis_env=program.axis_env,
    )


def _example(aval: Any) -> Any:
    # Only types on a mesh of explicit axes include their sharding.
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
