"""Equinox's and Lineax's primitives as Python: calls of `equinox.internal`, or of their `bind`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import equinox
import jax
from jax.extend.core import JaxprEqn

from jaxprtool.extend import rule
from jaxprtool.extend.rules import (
    ROOTS,
    CallExpression,
    Expression,
    Name,
    Slot,
    as_expression,
    call,
    constructors,
    unsupported,
)
from jaxprtool_equinox import modules
from jaxprtool_equinox.files import FILTERED, mapped

ROOTS["eqxi"] = "import equinox.internal as eqxi"
ROOTS["jaxprtool_equinox"] = "import jaxprtool_equinox"

#: The names of primitives that no function of Equinox binds directly.
_PRIMITIVES = {
    "maybe_set": "eqxi.maybe_set_p",
    "noinline": "eqxi.noinline_p",
    "select_if_vmap": "eqxi.select_if_vmap_p",
}
if find_spec("lineax") is not None:
    ROOTS["lxi"] = "import lineax.internal as lxi"
    _PRIMITIVES["linear_solve"] = "lxi.linear_solve_p"


@rule(
    "python",
    "unvmap_all",
    "unvmap_any",
    "unvmap_max",
    "nonbatchable",
    "nondifferentiable_backward",
    "nontraceable",
)
def _public(eqn: JaxprEqn, x: Slot) -> Iterator[Expression]:
    yield call(f"eqxi.{eqn.primitive.name}", x, **eqn.params)


@rule("python", *FILTERED, "maybe_set", "select_if_vmap", "vprim")
def _bound(eqn: JaxprEqn, *operands: Slot) -> Iterator[Expression]:
    try:
        yield CallExpression(_function(eqn), operands)
    except TypeError as error:
        raise unsupported(eqn, str(error)) from error


def _function(eqn: JaxprEqn) -> Expression:
    """Return the function of flat operands that an equation calls."""
    name, p = eqn.primitive.name, eqn.params
    if name == "vprim":
        axes = {"in_axes": tuple(p["__batch_axes"]), "axis_size": p["__axis_size"]}
        return call("jax.vmap", _function(mapped(eqn)), **axes)
    if name not in _PRIMITIVES:
        raise unsupported(eqn, "its primitive has no public name")
    primitive = Name(_PRIMITIVES[name])
    if name in FILTERED:
        arguments = map(as_expression, modules.arguments(p))
        return call("jaxprtool_equinox.filtered", primitive, *arguments)
    bind = Name(f"{primitive.path}.bind")
    return call("partial", bind, **p) if p else bind


# --- the values of parameters -----------------------------------------------------------------


def _named(maker: str, path: str, **fields: Any) -> Expression:
    return call(f"jaxprtool_equinox.{maker}", path, **fields)


def _module(value: Any) -> Expression:
    try:
        return _named("module", modules.path_of(type(value)), **_fields(value))
    except LookupError as error:
        raise TypeError(f"{error.args[0]} has no public name") from error


def _fields(value: Any) -> dict[str, Any]:
    return {name: as_expression(held) for name, held in modules.fields_of(value).items()}


def _enumeration(cls: Any) -> Expression:
    try:
        return _named("enumeration", modules.path_of(cls))
    except LookupError as error:
        raise TypeError(f"{error.args[0]} has no public name") from error


def _norm(value: Any) -> Expression:
    path = modules.function_path(value)
    if path is None:
        raise TypeError(f"the function {value.__qualname__} has no public name")
    return _named("function", path)


def _struct(value: Any) -> Expression:
    weak = {"weak_type": True} if value.weak_type else {}
    return call("jax.ShapeDtypeStruct", value.shape, value.dtype, **weak)


def _tree(tree: Any) -> Expression:
    return call("jax.tree.structure", jax.tree.unflatten(tree, [0] * tree.num_leaves))


# Before those of their base classes, which would be found first.
_kinds = {
    equinox.Module: _module,
    type(equinox.Enumeration): _enumeration,
    modules.Operand: lambda value: Name("jaxprtool_equinox.operand"),
    modules.Hoisted: lambda value: call(
        "jaxprtool_equinox.hoisted", as_expression(value.jaxpr), value.count
    ),
    FunctionType: _norm,
    jax.ShapeDtypeStruct: _struct,
    type(jax.tree.structure(0)): _tree,
    **{type(tag): lambda value: _named("tag", repr(value)) for tag in modules.tags().values()},
}
_others = dict(constructors)
constructors.clear()
constructors.update({**_kinds, **_others})
