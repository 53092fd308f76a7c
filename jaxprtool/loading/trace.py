"""Tracing of a function to a Program: the jaxpr of `jax.make_jaxpr`, with names and pytrees.

Invalid arguments are reported before JAX is called; any later exception comes from the user's
function and is reported as such.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import re
import sys
import textwrap
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType
from typing import Any, TypedDict

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, UserFunctionError, did_you_mean
from jaxprtool.ir import process
from jaxprtool.ir.arguments import (
    Changed,
    call_tracked,
    has_objects,
    result_paths,
    shared_variables,
    sharing,
    variable_leaves,
    without_unchanged,
)
from jaxprtool.ir.custom_rules import with_closed_over
from jaxprtool.ir.documents import plural
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.meshes import is_over_devices
from jaxprtool.ir.program import JitOptions, Program
from jaxprtool.ir.trees import StaticLeaf, filled, release, structure, unique
from jaxprtool.jaxcompat import Aval, ClosedJaxpr
from jaxprtool.jaxcompat.source_locations import is_installed, is_users_file
from jaxprtool.loading import Static
from jaxprtool.loading.target import mesh_conflict, methods_hint, value_needed


class StaticArguments(TypedDict, total=False):
    """Which arguments of a function are static, as in options of `jax.jit`."""

    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]


@dataclass(frozen=True)
class BoundCall:
    """The arguments of a call, split into traced and static ones.

    `static_args` maps positions, and `static_kwargs` names, to Python values. `args` and `kwargs`
    are the traced arguments, with leaves that are not arrays moved into the tree structure.
    `shared` tells which Flax NNX Variables are the same object
    (`ir.arguments.shared_variables`); it is None if changes of such objects are not results.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    static_args: dict[int, object]
    static_kwargs: dict[str, object]
    shared: tuple[int, ...] | None = ()

    @property
    def leaves(self) -> list[object]:
        """Return the flat arguments in the Program's order."""
        return jax.tree.leaves((self.args, self.kwargs))

    @property
    def positional(self) -> list[tuple[object, bool]]:
        """Each positional argument, and whether it is static."""
        positional = [(arg, False) for arg in self.args]
        for position, value in sorted(self.static_args.items()):
            positional.insert(position, (value, True))
        return positional

    @property
    def keywords(self) -> dict[str, tuple[object, bool]]:
        """Each keyword argument, and whether it is static."""
        traced = {name: (arg, False) for name, arg in self.kwargs.items()}
        return {name: (arg, True) for name, arg in self.static_kwargs.items()} | traced

    def position(self, number: int) -> int:
        """Return the index in the Program of the function's positional argument `number`.

        Raises ArgumentsError if there is none, or it is static.
        """
        count = len(self.args) + len(self.static_args)
        if not -count <= number < count:
            has = f"the call has {count}" if count else "the call has none"
            raise ArgumentsError(f"no positional argument {number} is given; {has}")
        number %= count
        if number in self.static_args:
            raise ArgumentsError(f"argument {number} is static, so it is not traced")
        return number - sum(position < number for position in self.static_args)


def trace(
    fun: Callable,
    /,
    *args: object,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    axis_env: Sequence[tuple[Hashable, int]] | None = None,
    **kwargs: object,
) -> Program:
    """Return the Program of `fun` on these arguments, without running it.

    A function under `jax.jit` is traced by its own `trace`: the program is its body, and
    `Program.jit` has the options of `jax.jit`.

    Leaves of arguments and results that are not arrays, such as functions in a module and strings,
    are not traced, but kept in the program's pytree structures. So are scalars in an Equinox
    module, and all scalars if `fun` is an Equinox transformation (`filter_jit`).

    Args:
        fun: The function.
        *args: Arrays, objects with a `.shape` and a `.dtype` such as `jax.ShapeDtypeStruct`,
            scalars, pytrees of these, or `static(...)` for a Python value that is not traced.
        static_argnums: Positions of arguments that are not traced, as for `jax.jit`.
        static_argnames: Names of arguments that are not traced, as for `jax.jit`.
        axis_env: Names and sizes of axes for collectives, as for `jax.make_jaxpr`.
        **kwargs: Keyword arguments, in the forms of `args`.

    Raises:
        ArgumentsError: If the arguments do not fit the function.
        UserFunctionError: If the function raises.
    """
    if not callable(fun):
        hint = methods_hint(fun, "its ")
        message = f"a value of type {type(fun).__name__} is not a function"
        raise ArgumentsError(message, f"trace {hint}" if hint else None)
    call = bind_arguments(fun, args, kwargs, static_argnums, static_argnames)
    return trace_call(function_name(fun), fun, call, axis_env)


def trace_call(
    name: str,
    fun: Callable,
    call: BoundCall,
    axis_env: Sequence[tuple[Hashable, int]] | None = None,
    *,
    opens_jit: bool = True,
) -> Program:
    """Return the Program of a bound call, named `name`.

    Args:
        name: The name of the program.
        fun: The function.
        call: Its arguments.
        axis_env: Names and sizes of axes for collectives.
        opens_jit: Whether the program of a function under `jax.jit` is its body, rather than one
            equation that calls the body.

    Raises:
        UserFunctionError: If the function raises.
    """
    jitted = Jitted.find(fun) if opens_jit else None
    traced_options: jaxcompat.TracedOptions | None = None
    try:
        with process.limit_of_user():
            if jitted is None:
                jaxpr, out = _made(name, fun, call, axis_env)
            else:
                positional = [arg for arg, _ in call.positional]
                keywords = {name: arg for name, (arg, _) in call.keywords.items()}
                watched = warn_about_changes(name, fun, _by_name(fun, positional, keywords))
                with watched, jaxcompat.axes_bound(axis_env or ()):
                    jaxpr, out, traced_options = jitted.trace(call.positional, call.keywords)
    except JaxprToolError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(name, error, fun, call) from error
    arguments, avals = (call.args, call.kwargs), [v.aval for v in jaxpr.invars]
    if isinstance(out, Changed):
        jaxpr, out = without_unchanged(jaxpr, out, jax.tree.structure(arguments))
    arg_names = unique([path for path, _ in named_leaves(fun, call)])
    program = Program(
        name=name,
        jaxpr=with_closed_over(jaxpr),
        in_tree=jax.tree.structure(arguments),
        out_tree=structure(out),
        arg_names=arg_names,
        out_names=result_paths(out),
        axis_env=tuple((name, size) for name, size in axis_env or ()),
        sharded=tuple(
            name for name, leaf in zip(arg_names, call.leaves, strict=True) if _is_sharded(leaf)
        ),
        bounds=_length_bounds(arguments, avals, arg_names),
    )
    if traced_options is None:
        return program
    return program.replace(
        jit=JitOptions.from_traced(program.arguments, program.results, traced_options)
    )


def _by_name(
    fun: Callable, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by their names."""
    return {**dict(zip(positional_names(fun, len(args)), args, strict=False)), **kwargs}


def _length_bounds(
    arguments: object, avals: Sequence[Aval], names: Sequence[str]
) -> tuple[tuple[str, Any], ...]:
    """Return the bounds of the lengths of each Ragged among the arguments, by name."""
    ragged = sys.modules.get("jaxprtool.ir.ragged")  # without it there is no Ragged
    bounds = ragged.bounds_of_lengths(arguments, avals) if ragged else ()
    return tuple((names[i], bound) for i, bound in bounds)


def _is_sharded(leaf: object) -> bool:
    """Return True if an argument has a sharding over several devices that `jax.jit` would keep."""
    if isinstance(leaf, jax.core.Tracer):  # JAX 0.10 cannot tell whether it is committed
        return False
    return getattr(leaf, "committed", True) and is_over_devices(getattr(leaf, "sharding", None))


def _made(
    name: str, fun: Callable, call: BoundCall, axis_env: Sequence[tuple[Hashable, int]] | None
) -> tuple[ClosedJaxpr, object]:
    """Return the jaxpr of a call of a function without `jax.jit`, and its result types."""
    traced = released(fun, call.shared, name, **call.static_kwargs)
    trees = []

    @functools.wraps(traced)
    def noting(*args: object, **kwargs: object) -> object:
        out = traced(*args, **kwargs)
        trees.append(jax.tree.structure(out))
        return out

    args = [StaticLeaf(arg) if static else arg for arg, static in call.positional]
    jaxpr = jax.make_jaxpr(noting, axis_env=axis_env)(*args, **call.kwargs)
    return jaxcompat.from_jax(jaxpr), filled(trees[-1], jaxpr.out_avals)


def function_name(fun: Any) -> str:
    """Return the name of a function, of the function in a partial, or of a callable's class."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    if not hasattr(fun, "__name__") and callable(getattr(fun, "__wrapped__", None)):
        return function_name(fun.__wrapped__)
    name = getattr(fun, "__name__", None) or type(fun).__name__
    return str(name).strip("<>")


#: The parameters of a function that accepts any arguments.
_ANY = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def signature(fun: Callable) -> inspect.Signature | None:
    """Return a function's signature, or None if it is unknown."""
    try:
        sig = inspect.signature(fun)
        if isinstance(fun, type) and {p.kind for p in sig.parameters.values()} == _ANY:
            # A metaclass may forward any arguments: use the method that receives them.
            init_sig = inspect.signature(fun.__init__)  # type: ignore[misc]
            return init_sig.replace(parameters=[*init_sig.parameters.values()][1:])
        return sig
    except (ValueError, TypeError):
        return None


def shown_signature(fun: Callable) -> str:
    """Return `loss(params, x, *, training)`, without annotations and on one line."""
    sig, empty = signature(fun), inspect.Signature.empty
    if sig is None:
        return f"{function_name(fun)}(...)"
    parameters = [
        p.replace(annotation=empty, default=p.default if _is_short(p.default) else _Dots())
        for p in sig.parameters.values()
    ]
    bare = sig.replace(parameters=parameters, return_annotation=empty)
    text = " ".join(f"{function_name(fun)}{bare}".split())
    return text if len(text) <= 200 else text[:197] + "..."


class _Dots:
    """Represents a default that is too long to show."""

    def __repr__(self) -> str:
        return "..."


def _is_short(default: object) -> bool:
    """Return True if a default, or its absence, is shown as it is."""
    return (
        default is None
        or default is inspect.Signature.empty
        or isinstance(default, bool | int | float | str)
    )


def bind_arguments(
    fun: Callable,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> BoundCall:
    """Return the traced and the static arguments of a call of `fun`.

    Raises ArgumentsError if the call does not fit the signature, or JAX does not accept an array.
    """
    _check_fit(fun, args, kwargs)
    positions, names = static_places(fun, args, kwargs, static_argnums, static_argnames)
    static_args = {i: arg for i, arg in enumerate(args) if i in positions}
    static_kwargs = {name: arg for name, arg in kwargs.items() if name in names}
    traced = (
        tuple(arg for i, arg in enumerate(args) if i not in static_args),
        {name: arg for name, arg in kwargs.items() if name not in static_kwargs},
    )
    call = BoundCall(
        *traced,
        {i: unwrapped(arg) for i, arg in static_args.items()},
        {name: unwrapped(arg) for name, arg in static_kwargs.items()},
    )
    named_leaves(fun, call)  # raises for an argument that is not a pytree
    arrays = held(fun, traced)
    for path, leaf in named_leaves(fun, replace(call, args=arrays[0], kwargs=arrays[1])):
        _check_leaf(path, leaf)
    types = jax.tree.map(_as_array_type, arrays)
    return replace(
        call, args=types[0], kwargs=types[1], shared=shared_variables(variable_leaves(traced))
    )


def named_leaves(fun: Callable, call: BoundCall) -> list[tuple[str, object]]:
    """Return each traced flat argument with its path: `x`, `params['w']`, `args[0]` for `*args`."""
    count = len(call.args) + len(call.static_args)
    names = positional_names(fun, count)
    dynamic = [names[i] for i in range(count) if i not in call.static_args]
    sig = signature(fun)
    parameters = sig.parameters if sig else {}
    spare = _parameter(sig, inspect.Parameter.VAR_KEYWORD) or "kwargs"
    values = [
        *zip(dynamic, call.args, strict=True),
        *(
            (name if name in parameters and name != spare else f"{spare}[{name!r}]", arg)
            for name, arg in sorted(call.kwargs.items())
        ),
    ]
    return [
        (name + jax.tree_util.keystr(path), leaf)
        for name, value in values
        for path, leaf in _flatten(name, value)
    ]


# --- leaves that are not arrays -----------------------------------------------------------------


def held(fun: object, tree: Any) -> Any:
    """Return a tree of arguments or results with untraced leaves moved into its structure.

    Scalars are traced, as in `jax.jit`, except in an Equinox module and in functions that Equinox
    calls, where they are moved as well, as in `equinox.filter_jit`.
    """
    if is_filtered(fun):
        return _held(tree, scalars=False)
    if Jitted.find(fun) is not None:  # which also traces the scalars of a module
        return _held(tree, scalars=True)
    return jax.tree.map(
        lambda node: _held(node, scalars=not _is_module(node)), tree, is_leaf=_is_module
    )


def _held(tree: Any, scalars: bool) -> Any:
    """Return a tree with all leaves in its structure but arrays and, if `scalars`, scalars."""

    def traced(leaf: Any) -> bool:
        return is_traced(leaf) and (scalars or not isinstance(leaf, _SCALARS))

    return jax.tree.map(lambda leaf: leaf if traced(leaf) else StaticLeaf(unwrapped(leaf)), tree)


def _is_module(node: object) -> bool:
    """Return True if a node of a tree is an Equinox module, without importing Equinox."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def released(
    fun: Callable,
    shared: Sequence[int] | None = (),
    watched: str = "",
    /,
    **static_kwargs: object,
) -> Callable:
    """Return a function that undoes `held` on its arguments, calls `fun`, and holds its results.

    It has the name of `fun`, and its signature without `static_kwargs`. If `fun` changes objects
    among its arguments, it returns a `Changed`, unless `shared` is None. `shared` tells which
    Variables in the arguments are the same object. `watched` is the name of `fun` in warnings of
    changes of plain objects; "" for no warnings.
    """

    def call(*args: object, **kwargs: object) -> object:
        static = [isinstance(arg, StaticLeaf) for arg in args]
        args, kwargs = sharing((args, kwargs), shared or ())
        by_name = _by_name(fun, args, {**kwargs, **static_kwargs})
        with warn_about_changes(watched, fun, by_name) if watched else contextlib.nullcontext():
            if shared is None or not has_objects((args, kwargs)):
                return held(fun, fun(*args, **kwargs, **static_kwargs))
            bound = functools.partial(fun, **static_kwargs)
            names = positional_names(fun, len(args))
            return held(fun, call_tracked(bound, args, kwargs, names, static))

    functools.update_wrapper(call, fun, updated=())
    sig = signature(functools.partial(fun, **static_kwargs))
    if sig is not None:
        call.__signature__ = sig  # type: ignore[attr-defined]
    return call


def is_traced(leaf: object) -> bool:
    """Return True if a leaf is an array or array-like: a scalar, or has a shape and a dtype."""
    if isinstance(leaf, _SCALARS):
        return True
    if isinstance(leaf, Static | type):
        return False
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return True
    try:
        jax.api_util.shaped_abstractify(leaf)
    except TypeError:
        return False
    return True


_SCALARS = (bool, int, float, complex)


def is_filtered(fun: Any) -> bool:
    """Return True if a function is an Equinox transformation, which traces arrays only."""
    while callable(inner := getattr(fun, "func", None)):  # a partial of functools or Equinox
        fun = inner
    package = type(fun).__module__.partition(".")[0]
    return package == "equinox" and hasattr(fun, "__wrapped__")


# --- static arguments ---------------------------------------------------------------------------


def unwrapped(arg: object) -> object:
    """Return the value of an argument that `static` marks; another argument as it is."""
    return arg.value if isinstance(arg, Static) else arg


def static_places(
    fun: Callable,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> tuple[set[int], set[str]]:
    """Return the static arguments of a call, by position and by name.

    They are marked `static(...)`, or static by `static_argnums`, `static_argnames` or the
    function's own `jax.jit`.
    """
    positions, names = _static_arguments(fun, len(args), static_argnums, static_argnames)
    if jitted := Jitted.find(fun):
        places = jitted.static_places(len(args))
        positions, names = positions | places[0], names | places[1]
    return (
        positions | {i for i, arg in enumerate(args) if isinstance(arg, Static)},
        names | {name for name, arg in kwargs.items() if isinstance(arg, Static)},
    )


def _static_arguments(
    fun: Callable,
    count: int,
    static_argnums: int | Sequence[int],
    static_argnames: str | Sequence[str],
) -> tuple[set[int], set[str]]:
    """Return the static positions and names; each also includes what the other implies."""
    numbers = [static_argnums] if isinstance(static_argnums, int) else list(static_argnums)
    names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
    order = positional_names(fun, count)
    for number in numbers:
        if not -len(order) <= number < len(order):
            raise ArgumentsError(
                f"static_argnums has {number}, but the call has {count} positional arguments",
                shown_signature(fun),
            )
    require_parameters(fun, sorted(names), "static_argnames")
    positions = {number % len(order) for number in numbers}
    named = {order[i] for i in positions}
    return positions | {i for i, name in enumerate(order) if name in names}, names | named


def require_parameters(fun: Callable, names: Iterable[str], what: str) -> None:
    """Raise ArgumentsError for a name that is not a parameter; `what` names its source."""
    sig = signature(fun)
    if sig is None or _parameter(sig, inspect.Parameter.VAR_KEYWORD):
        return
    for name in names:
        if name not in sig.parameters:
            hint = did_you_mean(name, sig.parameters) or shown_signature(fun)
            raise ArgumentsError(f"{what} has '{name}', which is not a parameter", hint)


def positional_names(fun: Callable, count: int) -> list[str]:
    """Return a name per position: those of the signature, and more if `count` exceeds them."""
    sig = signature(fun)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in sig.parameters.values() if p.kind in kinds] if sig else []
    rest = _parameter(sig, inspect.Parameter.VAR_POSITIONAL) or "args"
    return names + [f"{rest}[{i}]" for i in range(count - len(names))]


def _parameter(sig: inspect.Signature | None, kind: inspect._ParameterKind) -> str | None:
    parameters = sig.parameters.values() if sig else ()
    return next((p.name for p in parameters if p.kind is kind), None)


# --- checks -------------------------------------------------------------------------------------


def _check_fit(fun: Callable, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    sig = signature(fun)
    if sig is None:
        return
    try:
        sig.bind(*args, **kwargs)
    except TypeError as error:
        message = f"the arguments do not fit {shown_signature(fun)}: {error}"
        named = f", and {', '.join(kwargs)} by name" if kwargs else ""
        hint = f"got {plural(len(args), 'positional argument')}{named}"
        if _is_unbound_method(fun, sig):
            owner = fun.__qualname__.rpartition(".")[0]
            message = f"{fun.__qualname__} is a method without an object: {error}"
            bound = f"`instance = {owner}(...)` and `instance.{fun.__name__}`"
            hint = f"name a method of an object: {bound}"
        if not sig.parameters:
            hint = "if it returns the function that takes them, add --factory"
        raise ArgumentsError(message, hint) from None


def _is_unbound_method(fun: Any, sig: inspect.Signature) -> bool:
    """Return True for a function of a class that takes `self` and is not bound to an object."""
    is_method = inspect.isfunction(fun) and not fun.__qualname__.rpartition(".")[0].endswith(">")
    return is_method and "." in fun.__qualname__ and next(iter(sig.parameters), "") == "self"


def _flatten(name: str, value: object) -> list[tuple[Any, Any]]:
    try:
        return jax.tree_util.tree_flatten_with_path(value)[0]
    except ValueError as error:  # dict keys that cannot be sorted, a node used wrongly
        detail = " ".join(str(error).split())[:200]
        raise ArgumentsError(f"argument {name} is not a pytree: {detail}") from error


def _check_leaf(path: str, leaf: Any) -> None:
    if isinstance(leaf, jaxcompat.RefView):
        raise ArgumentsError(
            f"argument {path} is a view of a ref",
            "pass the ref, and take the view inside the function",
        )
    try:
        jax.api_util.shaped_abstractify(_as_array_type(leaf))
    except OverflowError:
        hint = "--x64 enables 64-bit integers" if -(2**63) <= leaf < 2**63 else None
        raise ArgumentsError(f"argument {path} is {leaf}, too large for its type", hint) from None
    except TypeError:
        raise ArgumentsError(
            f"argument {path} is an array of dtype {leaf.dtype}, which JAX does not trace",
            "to pass an untraced value, write static(...)",
        ) from None


#: JAX's arrays and array types; the type of a ref is not one of them.
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, jax.core.ShapedArray, np.ndarray, np.generic)


def _as_array_type(leaf: object) -> object:
    """Return the JAX type of an object with a shape and a dtype, from any library.

    A `tf.TensorSpec` has a TensorFlow dtype, a tensor a PyTorch one; both have names that NumPy
    recognizes. An object that cannot be converted is returned as it is.
    """
    if isinstance(leaf, _ARRAYS) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    try:
        if type(jax.api_util.shaped_abstractify(leaf)) is not jax.core.ShapedArray:
            return leaf
    except (TypeError, ValueError):  # JAX does not recognize its dtype or array protocol
        pass
    try:
        shape = tuple(map(operator.index, leaf.shape))
        return jax.ShapeDtypeStruct(shape, _dtype(leaf.dtype))
    except (TypeError, ValueError):
        return leaf


def _dtype(dtype: object) -> np.dtype:
    try:
        return jax.ShapeDtypeStruct((), dtype).dtype
    except TypeError:
        return getattr(dtype, "as_numpy_dtype", None) or np.dtype(str(dtype).rpartition(".")[2])


def _raised(name: str, error: BaseException, fun: Callable, call: BoundCall) -> UserFunctionError:
    """Return the error for an exception raised by the user's function, on one line."""
    if isinstance(error, SystemExit):
        return UserFunctionError(f"{name} called sys.exit({error.code!r}) while it was traced")
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("See http"))
    text = re.sub(r" \(https?://\S+\)$", "", text)
    text, hint = value_needed(text, function_name(fun), dict(named_leaves(fun, call)))
    text = text if len(text) <= 400 else text[:397] + "..."
    type_name = type(error).__name__
    if "Non-hashable static arguments" in text and "Tracer" in text:
        text = "a traced value was passed for a static argument of an inner function"
        hint = "write static(...) around it, or name it in --static-argnames"
    if "'dict' object has no attribute" in text:
        hint = "to pass an object of the target's module, write ref('NAME') in --args"
    if isinstance(error, TypeError) and hint is None and any(map(_is_list_of_scalars, call.args)):
        hint = "a list is a pytree of scalars: for an array, write array([1.0, 2.0]) in --args"
    if "in-place item assignment" in text:
        hint = "to pass a jax.Ref, which can be written in place, write new_ref(f32[3]) in --args"
    if "unbound axis name" in text:
        hint = 'bind it with `jaxprtool vmap --axis-name NAME`, or -p "batch(axis_name=...)"'
    if "all axes of mesh are of type `Explicit`" in text or "contracting dimensions are" in text:
        hint = (
            "the axes of --mesh are Explicit; with --in-specs they are Auto, and XLA shards values"
        )
    if "non-empty mesh in context" in text:
        hint = "set a mesh with --mesh data=4 and --in-specs \"P('data')\", or jax.set_mesh"
    message = f"{name} raised {type_name}: {text}" if text else f"{name} raised {type_name}"
    return mesh_conflict(message) or UserFunctionError(message, hint)


def _is_list_of_scalars(arg: object) -> bool:
    items = arg if isinstance(arg, list) else []
    scalars = [
        isinstance(item, int | float | complex) or getattr(item, "shape", None) == ()
        for item in items
    ]
    return bool(scalars) and all(scalars)


# --- jitted ---------------------------------------------------------------------------------------
# Trace functions under `jax.jit` by their own `trace`.
#
# Partials of such functions and methods are also supported. Their bound values are arguments to
# JAX, and constants of the Program.


@dataclass(frozen=True)
class Jitted:
    """A function under `jax.jit`, and the arguments that are bound to it."""

    fun: Any
    args: tuple[object, ...] = ()
    kwargs: tuple[tuple[str, object], ...] = ()

    @classmethod
    def find(cls, fun: Any) -> Jitted | None:
        """Return the function under `jax.jit` that a callable is or binds arguments of."""
        args: tuple[object, ...] = ()
        kwargs: dict[str, object] = {}
        while not jaxcompat.is_jitted(fun):
            if isinstance(fun, functools.partial):
                args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
                fun = fun.func
            elif inspect.ismethod(fun):
                args, fun = (fun.__self__, *args), fun.__func__
            elif jaxcompat.is_jitted(vars(type(fun)).get("__call__")):
                args, fun = (fun, *args), type(fun).__call__
            else:
                return None
        return cls(fun, args, tuple(kwargs.items()))

    def static_places(self, count: int) -> tuple[set[int], set[str]]:
        """Return the static positions among `count` positional arguments, and the static names."""
        numbers, names = self._static(len(self.args) + count)
        return {number - len(self.args) for number in numbers if number >= len(self.args)}, names

    def _static(self, count: int) -> tuple[set[int], set[str]]:
        """Return the same for `count` arguments including the bound ones."""
        numbers, names = jaxcompat.jit_static_arguments(self.fun)
        places = {number + count if number < 0 else number for number in numbers}
        return places & set(range(count)), set(names)

    def trace(
        self, positional: Sequence[tuple[object, bool]], keywords: Mapping[str, tuple[object, bool]]
    ) -> tuple[ClosedJaxpr, object, jaxcompat.TracedOptions]:
        """Return the jaxpr of a call, the types of its results in their tree, and the options.

        The jaxpr takes the traced arguments. Bound arguments, and those that are static in the call
        but not for `jax.jit`, are constants.

        Args:
            positional: The positional arguments, and whether each is static.
            keywords: The keyword arguments by name, and whether each is static.
        """
        args = [*((arg, True) for arg in self.args), *positional]
        kwargs = {**{name: (arg, True) for name, arg in self.kwargs}, **keywords}
        # JAX rejects values that are not arrays.
        call_args = release(
            (tuple(arg for arg, _ in args), {k: arg for k, (arg, _) in kwargs.items()})
        )
        stage = self.fun.trace(*call_args[0], **call_args[1])
        leaves = self._dynamic_leaves(args, kwargs)
        return self._without_bound(stage, leaves)

    def _dynamic_leaves(
        self, args: Sequence[tuple[object, bool]], kwargs: dict[str, tuple[object, bool]]
    ) -> list[tuple[object, bool]]:
        """Return each flat argument that JAX traces, and whether to make it a constant."""
        numbers, names = self._static(len(args))
        values = [pair for i, pair in enumerate(args) if i not in numbers]
        values += [kwargs[name] for name in sorted(kwargs) if name not in names]
        return [(leaf, bound) for value, bound in values for leaf in jax.tree.leaves(value)]

    @staticmethod
    def _without_bound(
        stage: jax.stages.Traced, leaves: Sequence[tuple[object, bool]]
    ) -> tuple[ClosedJaxpr, object, jaxcompat.TracedOptions]:
        captured = jaxcompat.captured_values(stage)
        traced_options = jaxcompat.traced_options(stage)
        constants = dict(enumerate(captured))
        constants |= {
            len(captured) + i: jnp.asarray(leaf) for i, (leaf, bound) in enumerate(leaves) if bound
        }
        jaxpr = jaxcompat.with_constants(
            jaxcompat.from_jax(stage.jaxpr), list(constants), list(constants.values())
        )
        kept = [i for i, (_, bound) in enumerate(leaves) if not bound]
        traced_options = traced_options._replace(
            donated=tuple(traced_options.donated[i] for i in kept),
            in_placements=tuple(traced_options.in_placements[i] for i in kept),
        )
        return jaxpr, filled(stage.out_tree, jaxpr.out_avals), traced_options


# --- plain objects --------------------------------------------------------------------------------
# Find plain Python objects that a function mutates when it is traced; its Program does not.
#
#     losses.append(loss)      self.count += 1      cache["x"] = x
#
# Objects reachable from a function are compared before and after tracing: its arguments, its
# closure, and the globals read by it and by the user's functions that it calls. The contents of
# lists, dicts, sets and objects of the user's classes are recorded. Arrays are not copied.

#: The maximum number of objects that are compared, the nearest first.
_MOST = 1000

_CONTAINERS = (dict, list, set, deque, tuple)

#: The name of a method's own object.
_SELF = "self"

#: Types whose values are compared by equality.
_COMPARED_TYPES = (bool, int, float, complex, str, bytes)

_MUTATORS = {
    *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    *("update", "setdefault", "popitem", "add", "discard", "appendleft", "popleft"),
}


@contextlib.contextmanager
def warn_about_changes(name: str, fun: Any, arguments: Mapping[str, object]) -> Iterator[None]:
    """Warn once about plain objects that a function mutates in a `with` block.

    Args:
        name: The function's name.
        fun: The function.
        arguments: Its arguments by name.
    """
    reached = _Reached(fun, arguments)
    yield
    changed = reached.changed()
    if changed:
        first, *others = changed
        line = reached.line(first)
        more = f" and {len(others)} more" if others else ""
        warnings.warn(
            f"{name} changes {first}{more} in place{f' at {line}' if line else ''}: the change "
            "happens once, during tracing, and not when the Program is called",
            stacklevel=2,
        )


class _Reached:
    """The objects reachable from a function, by path, and their contents."""

    def __init__(self, fun: Any, arguments: Mapping[str, object]) -> None:
        self._functions: list[FunctionType] = []
        #: The path of each object, the object, and its contents by path.
        self._held: list[tuple[str, object, dict[str, object]]] = []
        seen: set[int] = set()
        called = getattr_static(type(fun), "__call__", None)
        todo: list[tuple[str, object]] = [*arguments.items(), (_SELF, fun), (_SELF, called)]
        for path, value in todo:
            if id(value) in seen:
                continue
            seen.add(id(value))
            contents = self._contents(path, value)
            if contents is not None:
                self._held.append((path, value, contents))
                todo += contents.items()
            if len(todo) > _MOST:
                break

    def changed(self) -> list[str]:
        """Return the paths of changed values, the nearest first."""
        paths: dict[str, None] = {}
        for path, value, before in self._held:
            after = self._contents(path, value) or {}
            if isinstance(value, FunctionType):
                paths.update((n, None) for n in after if not _same(before.get(n), after[n]))
            elif before.keys() != after.keys() or not all(
                _same(before[name], after[name]) for name in before
            ):
                paths[path] = None
        return list(paths)

    def line(self, path: str) -> str:
        """Return the part of the source line that changes the value at a path, or ""."""
        root = path.partition(".")[0].partition("[")[0]
        for fun in self._functions:
            if (line := _changing_line(fun, root)) is not None:
                return f"{frames_now().path(fun.__code__.co_filename)}:{line}"
        return ""

    def _contents(self, path: str, value: object) -> dict[str, object] | None:
        """Return the contents of an object by path; None if it is not inspected."""
        if isinstance(value, functools.partial):
            args = {f"args[{i}]": arg for i, arg in enumerate(value.args)}
            return {**args, **value.keywords, _SELF: value.func}
        if isinstance(value, MethodType):
            return {_SELF: value.__self__, "__func__": value.__func__}
        if isinstance(value, FunctionType):
            return self._of_function(value)
        wrapped = None if isinstance(value, type) else getattr_static(value, "__wrapped__", None)
        if callable(wrapped):
            return {_SELF: wrapped}
        cls = type(value)
        if isinstance(value, _CONTAINERS) and cls.__module__ in ("builtins", "collections"):
            if len(value) > _MOST:
                return {f"len({path})": len(value)}
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return {f"{path}[{_text(key)}]": item for key, item in items}
        if not isinstance(value, type) and _is_users(cls) and not has_objects(value):
            fields = getattr(value, "__dict__", {})
            contents: dict[str, object] = {
                f"{path}.{name}": field for name, field in fields.items()
            }
            return contents
        return None

    def _of_function(self, fun: FunctionType) -> dict[str, object] | None:
        """Return the closure of a user's function and the globals that it names."""
        file = fun.__code__.co_filename
        if is_installed(file) or not is_users_file(file):
            return {_SELF: fun.__wrapped__} if hasattr(fun, "__wrapped__") else None
        if fun not in self._functions:
            self._functions.append(fun)
        closure: dict[str, object] = {_SELF: fun.__wrapped__} if hasattr(fun, "__wrapped__") else {}
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a closure variable that is not assigned yet
                closure[name] = cell.cell_contents
        names = {name for code in _codes(fun.__code__) for name in code.co_names}
        namespace = fun.__globals__
        return {**{name: namespace[name] for name in sorted(names) if name in namespace}, **closure}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _is_users(cls: type) -> bool:
    """Return True if a class is defined in one of the user's files."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and is_users_file(file) and not is_installed(file)


def _text(key: object) -> str:
    return repr(key) if isinstance(key, str | int) else f"<{id(key)}>"


def _same(before: object, after: object) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and type(before) in _COMPARED_TYPES and before == after


def _changing_line(fun: FunctionType, name: str) -> int | None:
    """Return the first line in a function that changes the variable `name`."""
    try:
        lines, first = inspect.getsourcelines(fun)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    line_numbers = [
        node.lineno + max(first, 1) - 1
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr)
        for target in _targets(node)
        if _root(target) == name
    ]
    return min(line_numbers, default=None)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement or a call changes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _MUTATORS:
            return [value]
    return []


def _root(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
