"""The form of Equinox's and Lineax's primitives in `.jaxpr` files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import equinox
import jax
from jax.extend.core import JaxprEqn

from jaxprtool.extend import rule
from jaxprtool.extend.rules import (
    ENCODERS,
    NO_AXIS_NAME,
    BadParameter,
    Encode,
    Form,
    Params,
    Unwritable,
    add_class,
    add_name,
    add_record,
    decode_params,
    encode_params,
    readable_params,
)
from jaxprtool_equinox import modules

#: The primitives whose parameters may be any Python objects.
FILTERED = ("linear_solve", "noinline")

# --- the values of parameters -------------------------------------------------------------------


def _named(maker: str, path: Callable[[], str], *more: str) -> str:
    try:
        return f"{maker}({', '.join((repr(path()), *more))})"
    except LookupError as error:
        raise Unwritable(str(error.args[0])) from error


def _module(value: Any, encode: Encode) -> str:
    try:
        fields = modules.fields_of(value)
    except LookupError as error:
        raise Unwritable(str(error.args[0])) from error
    pairs = [f"{name}={encode(held)}" for name, held in fields.items()]
    return _named("Module", lambda: modules.path_of(type(value)), *pairs)


def _enumeration(cls: Any, encode: Encode) -> str:
    return _named("Enumeration", lambda: modules.path_of(cls))


_other_function = ENCODERS[FunctionType]


def _function(value: Any, encode: Encode) -> str:
    path = modules.function_path(value)
    return _other_function(value, encode) if path is None else f"function({path!r})"


add_class(equinox.Module, _module, Module=modules.module)
add_class(type(equinox.Enumeration), _enumeration, Enumeration=modules.enumeration)
add_class(FunctionType, _function, function=modules.function)
add_class(modules.Operand, lambda value, encode: "operand")
add_class(
    modules.Hoisted,
    lambda value, encode: f"hoisted({encode(value.jaxpr)}, {value.count})",
    hoisted=modules.hoisted,
)
add_name("operand", modules.operand)
add_record(jax.ShapeDtypeStruct, ["shape", "dtype", "weak_type"])
for _name, _tag in modules.tags().items():
    add_name(f"lineax.{_name}", _tag)
    add_class(type(_tag), lambda value, encode: f"lineax.{value!r}")


# --- filtered primitives ----------------------------------------------------------------------


def _write_filtered(eqn: JaxprEqn) -> Params:
    return {"args": modules.arguments(eqn.params)}


def _read_filtered(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    if not isinstance(given["args"], tuple):
        raise BadParameter("args must be a tuple")
    return modules.parameters(given["args"])


@rule("equivalence", *FILTERED)
def _compared(eqn: JaxprEqn) -> Params:
    params = modules.parameters(modules.arguments(eqn.params))
    return {name: params[name] for name in ("treedef", "static")}


rule("jaxpr", *FILTERED)(Form(_write_filtered, _read_filtered))


# --- primitives under vmap --------------------------------------------------------------------


def mapped(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation that a `vprim` maps, with the operands of the `vprim`."""
    return eqn.replace(primitive=eqn.params["prim"], params=dict(eqn.params["params"]))


def _write_mapped(eqn: JaxprEqn) -> Params:
    p = eqn.params
    shown = {"prim": p["prim"].name, "axis_size": p["__axis_size"]}
    if p["__axis_name"] is not NO_AXIS_NAME:
        shown["axis_name"] = p["__axis_name"]
    shown["batch_axes"] = tuple(p["__batch_axes"])
    return {**shown, "params": encode_params(mapped(eqn))}


def _read_mapped(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    primitive, params = decode_params(given["prim"], given["params"], operands, results)
    return {
        "prim": primitive,
        "__axis_size": given["axis_size"],
        "__axis_name": given.get("axis_name", NO_AXIS_NAME),
        "__batch_axes": given["batch_axes"],
        "params": tuple(params.items()),
    }


@rule("equivalence", "vprim")
def _compared_mapped(eqn: JaxprEqn) -> Params:
    inner = mapped(eqn)
    params = readable_params.get(inner.primitive.name, lambda eqn: eqn.params)(inner)
    return {**eqn.params, "__batch_axes": tuple(eqn.params["__batch_axes"]), "params": params}


rule("jaxpr", "vprim")(Form(_write_mapped, _read_mapped))
