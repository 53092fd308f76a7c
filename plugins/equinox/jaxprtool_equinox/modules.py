"""The objects in arguments of Equinox's filtered primitives, by name.

Only classes of Equinox and of packages based on it are found, and only functions that are norms for
their solvers, so that a file cannot name anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import equinox
import equinox.internal
import jax
from equinox.internal import _primitive

from jaxprtool import extend

#: The packages whose classes may be named.
_PACKAGES = ("equinox", "lineax", "optimistix", "diffrax")

with suppress(ImportError):  # it defines a primitive
    import_module("lineax.internal")


class Operand:
    """A placeholder for an array among the arguments of a primitive."""

    def __repr__(self) -> str:
        return "operand"


operand = Operand()


# --- by name ----------------------------------------------------------------------------------


def path_of(cls: type) -> str:
    """Return the path of a class. Raises LookupError if the class cannot be found by its path."""
    path = f"{cls.__module__}.{cls.__qualname__}"
    if _class(path) is not cls:
        raise LookupError(f"an object of {path}")
    return path


def _class(path: str) -> type:
    package = path.partition(".")[0]
    if package not in _PACKAGES:
        raise LookupError(f"'{path}' is not a class of {', '.join(_PACKAGES)}")
    import_module(package)
    for base in (equinox.Module, equinox.Enumeration):
        for cls in _below(base):
            if f"{cls.__module__}.{cls.__qualname__}" == path:
                return cls
    raise LookupError(f"{package} has no class '{path}'")


def _below(cls: Any) -> Iterator[Any]:
    for each in type.__subclasses__(cls):
        yield each
        yield from _below(each)


def fields_of(module: Any) -> dict[str, Any]:
    """Return the fields of a module. Raises LookupError if it has other attributes."""
    names = [field.name for field in dataclasses.fields(module)]
    if extra := vars(module).keys() - set(names):
        raise LookupError(f"a {type(module).__qualname__} with the attribute {min(extra)}")
    return {name: vars(module)[name] for name in names if name in vars(module)}


def module(path: str, /, **fields: Any) -> Any:
    """Return a module of the class at a path with these fields, without running code of the class.

    Raises LookupError if there is no such class, and TypeError for a field that it does not have.
    """
    cls = _class(path)
    if not issubclass(cls, equinox.Module):
        raise LookupError(f"'{path}' is not an equinox.Module")
    made = object.__new__(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    for name, value in fields.items():
        if name not in names:
            raise TypeError(f"{path} has no field '{name}'")
        object.__setattr__(made, name, value)
    return made


def enumeration(path: str) -> Any:
    """Return the enumeration at a path. Raises LookupError."""
    cls = _class(path)
    if not isinstance(cls, type(equinox.Enumeration)):
        raise LookupError(f"'{path}' is not an equinox.Enumeration")
    return cls


def _functions() -> dict[str, FunctionType]:
    found = {}
    for package in ("lineax.internal", "optimistix"):
        with suppress(ImportError):
            home = import_module(package)
            for name in ("max_norm", "rms_norm", "two_norm"):
                value = getattr(home, name, None)
                if isinstance(value, FunctionType):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def function(path: str) -> Any:
    """Return the norm at a path. Raises LookupError."""
    if path not in _functions():
        raise LookupError(f"'{path}' is not one of the norms that solvers take")
    return _functions()[path]


def function_path(value: Any) -> str | None:
    """Return the path of a function that `function` finds; None for any other."""
    return next((path for path, known in _functions().items() if known is value), None)


def tags() -> dict[str, Any]:
    """Return Lineax's tags of operators, by name."""
    try:
        lineax = import_module("lineax")
    except ImportError:
        return {}
    return {name: value for name, value in vars(lineax).items() if name.endswith("_tag")}


def tag(name: str) -> Any:
    """Return the tag with a name. Raises LookupError."""
    if name not in tags():
        raise LookupError(f"lineax has no '{name}'")
    return tags()[name]


# --- the arguments of filtered primitives -----------------------------------------------------


def arguments(params: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a filtered primitive, with `operand` in place of each array."""
    missing = _primitive._missing_dynamic
    leaves = [operand if leaf is missing else leaf for leaf in params["static"]]
    args = jax.tree.unflatten(params["treedef"], leaves)
    return jax.tree.map(_lifted, jax.tree.map(_traced, args, is_leaf=_is_jacobian))


class Hoisted(NamedTuple):
    """A closed jaxpr whose first `count` arguments are constants for Equinox, and operands here."""

    jaxpr: Any
    count: int


def _lifted(value: Any) -> Any:
    if not isinstance(value, extend.Jaxpr) or not value.constvars:
        return value
    debug_info = value.debug_info._replace(arg_names=None)
    invars = [*value.constvars, *value.invars]
    parts = invars, value.outvars, value.eqns
    return Hoisted(extend.new_jaxpr([], [], *parts, debug_info), len(value.constvars))


def hoisted(jaxpr: Any, count: int) -> Any:
    """Return an open jaxpr that has the first `count` arguments of a closed one as constants."""
    body = extend.open_jaxpr(jaxpr)
    return extend.replace_jaxpr(
        body,
        constvars=body.invars[:count],
        consts=[None] * count,
        invars=body.invars[count:],
        outvars=body.outvars,
        eqns=body.eqns,
        debug_info=body.debug_info._replace(arg_names=None),
    )


def _is_jacobian(value: Any) -> bool:
    """Return True if a value is Lineax's Jacobian of a global function, which is not traced yet."""
    named = isinstance(value, equinox.Module) and type(value).__name__ == "JacobianLinearOperator"
    return named and type(value.fn).__name__ == "_TrivialClosureConvert"


def _traced(value: Any) -> Any:
    """Return a Jacobian whose function is a jaxpr that takes only the arrays among its arguments.

    The other arguments may be functions.
    """
    if not _is_jacobian(value):
        return value
    leaves, tree = jax.tree.flatten(value.args)
    places = [i for i, leaf in enumerate(leaves) if leaf is operand]
    structs, known = value.fn.in_dynamic_struct
    (x, args), _ = jax.tree.unflatten(known, structs)

    def of_arrays(x: Any, arrays: tuple[Any, ...]) -> Any:
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        return value.fn(x, jax.tree.unflatten(tree, given))

    fn = equinox.filter_closure_convert(of_arrays, x, tuple(jax.tree.leaves(args)))
    fields = {**fields_of(value), "fn": fn, "args": (operand,) * len(places)}
    return module(path_of(type(value)), **fields)


def parameters(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the parameters for some arguments: the inverse of `arguments`."""
    leaves, treedef = jax.tree.flatten(args)
    missing = _primitive._missing_dynamic
    static = tuple(missing if leaf is operand else leaf for leaf in leaves)
    return {"treedef": treedef, "static": static, "flatten": _primitive.Flatten()}


def filtered(primitive: Any, *args: Any) -> Callable[..., list[Any]]:
    """Return the function of arrays that binds a filtered primitive.

    Args:
        primitive: A primitive that is bound by `equinox.internal.filter_primitive_bind`.
        args: Its arguments, with `operand` in the place of each array.

    Returns:
        A function of these arrays, in order, which returns the arrays among the results.
    """

    def bound(*arrays: Any) -> list[Any]:
        return list(primitive.bind(*arrays, **parameters(args)))

    return bound
