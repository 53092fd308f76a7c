"""Hints for targets that cannot be traced: what the user can write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.tree_util import PyTreeDef

from jaxprtool.errors import MeshConflictError, TargetError
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.static_leaf import StaticLeaf

# --- targets that are not the function to trace -----------------------------------------------


def target_hint(fun: Callable, target: str, args: str, made: bool) -> str | None:
    """Return what to write instead of a target that is a class or a Flax Linen module.

    Args:
        fun: The object that the target names, or the result of the factory that it names.
        target: The target.
        args: Its arguments, in the notation of `--args`.
        made: Whether `fun` was returned by a factory.
    """
    if hint := class_hint(fun):
        return hint
    if any(cls.__module__.startswith("flax.linen") for cls in type(fun).__mro__):
        if made:
            return "return the module's apply, with (variables, x) as its arguments"
        return (
            f'pass a key to create its variables: {target}.init_with_output --args "key(0), {args}"'
        )
    return None


def class_hint(fun: Callable) -> str | None:
    """Return what to write instead of a class whose instance is to be traced."""
    if not isinstance(fun, type):
        return None
    name = fun.__name__
    return f"{name} is a class; name a function that returns {name}(...), and add --factory"


#: The axes of a mesh in a message, and the type of the first one.
_MESH = re.compile(r"Mesh\(([^()]*), axis_types=\((\w+)")


def mesh_conflict(message: str) -> MeshConflictError | None:
    """Return the error for the message of a function with a mesh of its own; None for others."""
    if "should match the mesh passed to shard_map" not in message:
        return None
    found = MeshConflictError(message, "the function has a mesh of its own; omit --mesh")
    meshes = _MESH.findall(message)
    if meshes and meshes[0][1] == AxisType.Manual.name:
        found.hint = (
            "the function maps over devices within a pmap or shard_map, which JAX refuses; "
            "use vmap for one of them, or a shard_map over both axes"
        )
        return found
    if len(meshes) != 2:  # a long message is cut
        return found
    (axes, kind_set), (own_axes, kind) = meshes
    found.is_alike = axes == own_axes and kind_set != kind
    if found.is_alike:
        found.hint = f"the axes of the function's own mesh are {kind}: " + (
            "shard its arguments with --in-specs, not by type"
            if kind == AxisType.Auto.name
            else "shard its arguments by type, f32[8@x], not with --in-specs"
        )
    return found


def require_arrays(program: Program, target: str, hint: str | None) -> None:
    """Raise TargetError for a function that returns a function, or an object without arrays.

    `hint` is the hint for the target in other cases.
    """
    tree, name = program.out_tree, program.name
    add = f"to trace that function, add --factory: {target} --factory"
    if _is_made_by_factory(tree, bool(program.jaxpr.invars)):
        raise TargetError(f"{name} returns a function and its arguments", add)
    node = tree.node_data()
    if node is None or node[0] is not StaticLeaf:
        return
    value = node[1].value
    if not callable(value):
        type_name = type(value).__name__
        raise TargetError(f"{name} returns a value of type {type_name}, not arrays", hint)
    if program.jaxpr.invars:
        add = f'to trace that function, write the call in TARGET: "{target}(...)"'
    raise TargetError(f"{name} returns a function, not arrays", hint or add)


def _is_made_by_factory(tree: PyTreeDef, takes_arrays: bool) -> bool:
    """Return True if a structure is (function, args) or (function, args, kwargs).

    A function that takes arrays may return a callable module, as a training step does.
    """
    parts = [part.node_data() for part in tree.children()]
    if (tree.node_data() or (None,))[0] not in (tuple, list) or len(parts) not in (2, 3):
        return False
    fun, args = parts[:2]
    if fun is None or args is None or args[0] not in (tuple, list):
        return False
    return (
        callable(fun[1].value) if fun[0] is StaticLeaf else not takes_arrays and _has_call(fun[0])
    )


def _has_call(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)


# --- errors of module libraries -----------------------------------------------------------------

#: Messages of module libraries for incorrect use, and what to write instead.
_OF_MODULES = (
    (r"missing .* argument: 'rngs'", "give it rngs=nnx.Rngs(0)"),
    (
        r"`deterministic` is False, but no `rngs`",
        "turn dropout off with model.eval(), or pass rngs",
    ),
    (
        r"Cannot mutate \w+ from a different trace level",
        "pass the module that it changes as an argument: def f(model, x), --args \"ref('model'), "
        'f32[3]"',
    ),
    (r"missing .* argument: 'key'", "pass key=jax.random.key(0)"),
    (
        r"Dropout requires a key",
        "turn dropout off with eqx.nn.inference_mode(model), or pass a key to the call",
    ),
    (r"Can't call compact methods on unbound modules", "call it as model.apply(variables, x)"),
    (
        r'from collection "\w+" in .* but the collection is empty',
        "pass its variables as the first argument: jax.eval_shape(model.init, jax.random.key(0), "
        "x)",
    ),
    (r"needs PRNG for \"dropout\"", 'pass apply rngs={"dropout": key}, or deterministic=True'),
    (
        r"must be initialized inside an `hk.transform`",
        "write net = hk.transform(f) in the file, and name net.apply as TARGET",
    ),
)


def module_hint(text: str) -> str | None:
    """Return what to write instead if modules are used incorrectly."""
    return next((hint for said, hint in _OF_MODULES if re.search(said, text)), None)


# --- values that Python code needs during tracing ---------------------------------------------

_ASKED_BY = re.compile(
    r"\s*The error occurred while tracing the function (?P<function>\S+) at \S+ for \w+\."
    r"(?: This concrete value was not available in Python because it depends on the values? of "
    r"the arguments? (?P<arguments>.+?)\.)?"
)

#: Messages of JAX for a traced value that Python code needs, and what to write instead.
_INSTEAD = {
    "boolean conversion": "choose by an array with jnp.where or jax.lax.cond",
    "__array__": "use jax.numpy instead of numpy for traced arrays",
    "`float` function": "convert an array with jnp.asarray(x, float)",
    "`int` function": "convert an array with jnp.asarray(x, int)",
}


def value_needed(text: str, name: str, given: Mapping[str, object]) -> tuple[str, str | None]:
    """Return a shortened JAX message for a traced value that Python code needs, and a hint.

    Args:
        text: JAX's message, on one line.
        name: The name of the traced function.
        given: Its flat arguments, by path.
    """
    found = list(_ASKED_BY.finditer(text))  # one per value
    if not found:
        return _size_needed(text)
    said = _ASKED_BY.sub("", text).rstrip(" .")
    asked = dict.fromkeys(
        part for each in found for part in re.split(r", | and ", each["arguments"] or "") if part
    )
    if not asked:
        return said, None
    said += f"; it depends on {', '.join(asked)}"
    own = all(each["function"].strip("<>") == name for each in found)
    if own and all(_is_setting(given.get(path)) for path in asked):
        return said, _static_hint(list(asked), given)
    return said, next((hint for words, hint in _INSTEAD.items() if words in text), None)


#: Messages of JAX and Python for a symbolic size where the function needs a number.
_SYMBOL_ASKED = re.compile(r"Symbolic dimension .*?'|'_DimExpr'")

_LINEAR = r"(?P<name>\w+)(?: (?P<sign>[+-]) (?P<added>\d+))?"

#: A comparison of a symbol plus an offset with a number.
_COMPARED = re.compile(rf"'{_LINEAR}' (?P<by>[<>]=?) '(?P<to>\d+)'")

#: The size of a slice clipped to the array, such as `table[:n]`.
_CUT = re.compile(rf"min\((?P<to>\d+), {_LINEAR}\)")


_MULTIPLE = "with type f32[8*n] the number of rows is a multiple of 8"


def _size_needed(text: str) -> tuple[str, str | None]:
    """Return a shortened JAX message for a symbolic size where a number is needed, and a hint."""
    said = re.split(r"[. ]+(?:This error arises for|Using symbolic scope)", text)[0].rstrip(".")
    if "Cannot divide evenly the sizes" in text:
        return said, _MULTIPLE
    cut = _CUT.search(text)
    if cut and "incompatible shapes" in text:
        return said, _no_more(cut["name"], _limit(cut))
    if not _SYMBOL_ASKED.search(text):
        return text, None
    if "comparison" in said:
        return said, _comparison_hint(said)
    return said, (
        "a symbol is not a number: x.shape[0] can be symbolic, but len(x) and float(x.shape[0]) "
        "cannot"
    )


def _limit(found: re.Match[str]) -> int:
    """Return the number that the symbol alone is compared with."""
    return int(found["to"]) - int(f"{found['sign'] or ''}{found['added'] or 0}")


def _no_more(name: str, most: int) -> str:
    return f"f32[{name}<={most}] declares {_rows(most, 'at most')}"


def _rows(count: int, bound: str) -> str:
    return f"{bound} 1 row" if count == 1 else f"{bound} {count} rows"


def _comparison_hint(said: str) -> str:
    """Return a hint with a type that makes a comparison of sizes true or false."""
    found = _COMPARED.search(said)
    if "floordiv" in said or "mod(" in said:
        return _MULTIPLE
    if found is None:
        return "a symbol is any size from 1; f32[n+1] declares at least 2 rows"
    name, least = found["name"], _limit(found) + (found["by"] in (">", "<="))
    if least <= 1:
        return _no_more(name, 1)
    more = f"f32[{name}>={least}], or f32[{name}+{least - 1}], declares at least {least}"
    return f"{_no_more(name, least - 1)}; {more}"


def _is_setting(value: object) -> bool:
    """Return True if an argument can be a setting: an integer or a boolean."""
    if isinstance(value, bool | int):
        return True
    dtype = getattr(value, "dtype", None)
    scalar_types = jax.numpy.bool_, jax.numpy.integer
    return getattr(value, "shape", None) == () and any(
        jax.numpy.issubdtype(dtype, scalar_type) for scalar_type in scalar_types
    )


def _static_hint(paths: Sequence[str], given: Mapping[str, Any]) -> str:
    if all(path.isidentifier() and isinstance(given[path], int) for path in paths):
        return f"to make it static, add --static-argnames {','.join(paths)}"
    path, value = paths[0], given[paths[0]]
    if not isinstance(value, int):  # a type, or an array
        value = value.dtype == bool or 1
    return f"to make {path} static, write its value in --args as static({value})"
