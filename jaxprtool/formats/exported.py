"""Programs as artifacts of `jax.export`: StableHLO with pytree structures.

Plain `jax.export.deserialize(data).call(*args)` takes the arguments of the function.
`read_exported` returns a program of one `call_exported` equation with the same names, which can be
shown and run.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import export

from jaxprtool import jaxcompat
from jaxprtool.errors import OutputError, ProgramFileError, UnsupportedError, described
from jaxprtool.formats.lowering import platform_names, reported, traced, under_mesh
from jaxprtool.ir.basics.dtypes import is_foreign
from jaxprtool.ir.basics.paths import paths
from jaxprtool.ir.core.equations import equations, named
from jaxprtool.ir.core.structured import view
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.programs.state import has_objects
from jaxprtool.ir.programs.trees import filled

_FLATBUFFERS = "pip install flatbuffers"


def exported(program: Program, platforms: Sequence[str] = ()) -> bytes:
    """Return the artifact for these platforms, or for JAX's default one.

    Unused arguments are kept, so that it takes the function's arguments. Raises UnsupportedError if
    the program cannot be exported, BackendError for a platform unknown to JAX, and OutputError if
    the package flatbuffers is not installed.
    """
    names = platform_names(platforms)
    _require_portable(program)
    with under_mesh(program), reported(program, "exported"):
        artifact = export.export(_Wrapped(program), platforms=names)()
    try:
        return bytes(artifact.serialize())
    except ImportError as error:
        raise OutputError(f"cannot export {program.name}: {error}", _FLATBUFFERS) from error
    except Exception as error:  # a tree with nodes that JAX cannot serialize
        raise UnsupportedError(f"{program.name} cannot be exported: {described(error)}") from error


def _require_portable(program: Program) -> None:
    """Raise UnsupportedError for Python callbacks and free named axes."""
    refused = f"{program.name} cannot be exported"
    for eqn in equations(top_jaxpr(program)):
        if traits(eqn).callback:
            hint = "stablehlo and hlo show such a call as a custom_call"
            raise UnsupportedError(f"{refused}: {named(eqn)} calls a Python function", hint)
    for name, aval in (*program.arguments, *program.results):
        if is_foreign(getattr(aval, "dtype", None)):
            what = f"elements of {aval.dtype}, a type defined by a package"
            raise UnsupportedError(f"{refused}: {name} has {what}")
    if has_objects(filled(program.in_tree, program.in_avals)):
        raise UnsupportedError(
            f"{refused}: it takes objects of Flax NNX, which an artifact cannot hold",
            "take nnx.to_pure_dict(nnx.state(model)) instead, update a model with it in the "
            "function with nnx.update, and return the new state",
        )
    if program.axis_env:
        axes = ", ".join(str(name) for name, _ in program.axis_env)
        raise UnsupportedError(f"{refused}: nothing binds its axes {axes}")


class _Wrapped:
    """A program with the interface of a jitted function (`jax.stages.Wrapped`), for `export`."""

    def __init__(self, program: Program):
        self._program = program

    def trace(self, *args: object, **kwargs: object) -> jax.stages.Traced:
        return traced(self._program, keep_unused=True)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        return self.trace().lower()

    def eval_shape(self, *args: object, **kwargs: object) -> object:
        return self.trace().out_info

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._program(*args, **kwargs)


# --- reading ----------------------------------------------------------------------------------


def is_exported(data: bytes) -> bool:
    """Return True if these bytes look like an artifact: a flatbuffer with a StableHLO module."""
    return b"ML\xefR" in data[4:] and b"StableHLO" in data and not data.startswith(b"ML\xefR")


def read_exported(data: bytes, path: str = "the artifact") -> Program:
    """Return the program in an artifact; `path` is its name in errors.

    Raises ProgramFileError for any other bytes, OutputError if flatbuffers is not installed.
    """
    try:
        artifact = export.deserialize(bytearray(data))
        arg_names, out_names = _names(artifact)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in artifact.in_avals]
        args, kwargs = filled(artifact.in_tree, shapes)
        jaxpr = jax.make_jaxpr(artifact.call)(*args, **kwargs)
        if not artifact.has_vjp():  # JAX's derivative rule around the call would only raise
            (eqn,) = jaxpr.eqns
            jaxpr = view(eqn).body
    except ImportError as error:
        raise OutputError(f"cannot read {path}: {error}", _FLATBUFFERS) from error
    except Exception as error:  # a decoder may raise anything on foreign bytes
        raise ProgramFileError(
            f"{path} is not an artifact of jax.export: {described(error)}"
        ) from error
    return Program(
        name=artifact.fun_name,
        jaxpr=jaxpr,
        in_tree=artifact.in_tree,
        out_tree=artifact.out_tree,
        arg_names=arg_names,
        out_names=out_names,
    )


def _names(artifact: export.Exported) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a name per flat argument and result: from the module, or else the tree path."""
    arg_names, out_names = jaxcompat.exported_names(artifact)
    args, kwargs = filled(artifact.in_tree, artifact.in_avals)
    results = filled(artifact.out_tree, artifact.out_avals)
    arg_paths = [*paths("args", args)]
    for name, value in kwargs.items():
        arg_paths += paths(name, value)
    return _one_each(arg_names, arg_paths), _one_each(out_names, paths("result", results))


def _one_each(names: dict[int, str], paths: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(names.get(i, path) for i, path in enumerate(paths))
    return chosen if len(set(chosen)) == len(chosen) else tuple(paths)
