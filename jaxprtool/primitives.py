"""The primitive `sow`, and the functions that use it: `sow`, `variable`, `nest`.

A function that sows a value gives it a name, for a pass to find:

    w = variable(jax.random.normal(key, (x.shape[-1], 8)), name="w")

`sow` is the identity under every JAX transformation and has no cost once compiled. `unzip` turns
sown variables into results of one program and arguments of another. The functions and their
contracts are those of Oryx (2020-2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import DebugInfo, Primitive
from jax.interpreters import ad, batching, mlir
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.ir.notation.signatures import SHOWN_PARAMS
from jaxprtool.jaxcompat import JaxprEqn, Params

#: The tag of `variable`.
VARIABLE = "variable"

#: How values sown under the same name are handled: an error, all of them, or the last.
MODES = ("strict", "append", "clobber")

#: The structure of a value that is one array.
LEAF = jax.tree.structure(0)

#: The prefix of the name of a `nest` call; its scope follows.
SCOPE_PREFIX = "nest:"


def sow(value: object, *, tag: str, name: str, mode: str = "strict", key: object = None) -> Any:
    """Return `value`, and name it for passes that look for `tag`.

    Args:
        value: A pytree of arrays.
        tag: The tag, such as "variable".
        name: The name.
        mode: How to handle several values with the same name: "strict", an error; "append", all of
            them in order; "clobber", the last one.
        key: A pytree. If given, the returned value depends on it, as if computed from it.

    Raises:
        ValueError: If the tag is None, or the mode is unknown.
        TypeError: If the tag or the name is not a string.
    """
    if tag is None:
        raise ValueError("Must provide a tag to sow under.")
    for what, text in ("tag", tag), ("name", name):
        if not isinstance(text, str | None):
            raise TypeError(f"the {what} of a sown value must be a string, not {text!r}")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; available: {', '.join(MODES)}")
    leaves, tree = jax.tree.flatten(value)
    operands = (*leaves, *jax.tree.leaves(key))
    if not (jaxcompat.is_staging() or any(map(_is_traced, operands))):
        return value  # unchanged: `bind` would turn NumPy arrays and numbers into JAX arrays
    sown = sow_p.bind(*operands, tag=tag, name=name, mode=mode, tree=tree)
    return jax.tree.unflatten(tree, sown)


def variable(value: object, *, name: str) -> Any:
    """Return `value`, named for `unzip` as the initial value of the variable `name`.

    Args:
        value: A pytree of arrays.
        name: The name of the variable, which must be unique in its scope; see `nest`.

    Raises:
        TypeError: If the name is not a string.
    """
    return sow(value, tag=VARIABLE, name=name, mode="strict")


def nest(fun: Callable[..., Any], *, scope: str) -> Callable[..., Any]:
    """Return `fun` with the names sown inside it placed under `scope`.

    In a jaxpr it is a `jit` call whose name has the scope. Called without tracers, it is `fun`
    itself.

    Args:
        fun: The function.
        scope: The scope, such as "layer1".

    Raises:
        TypeError: If the scope is not a string.
    """
    if not isinstance(scope, str):
        raise TypeError(f"a scope must be a string, not {scope!r}")

    @functools.wraps(fun)
    def nested(*args: Any, **kwargs: Any) -> Any:
        if not jaxcompat.is_staging():
            return fun(*args, **kwargs)
        # Values that are not tracers may have any type and may control the Python code: they bypass
        # the call unchanged.
        leaves, tree = jax.tree.flatten((args, kwargs))
        marks = list(map(_is_traced, leaves))
        results: tuple[Any, list[bool], list[Any]]

        def scoped(*traced: Any) -> list[Any]:
            nonlocal results
            inner_args, inner_kwargs = jax.tree.unflatten(tree, _merged(traced, marks, leaves))
            outs, out_tree = jax.tree.flatten(fun(*inner_args, **inner_kwargs))
            flags = list(map(_is_traced, outs))
            # Tracers of the inner trace must not leak.
            results = out_tree, flags, [None if f else x for f, x in zip(flags, outs, strict=True)]
            return list(compress(outs, flags))

        debug = _debug_info(fun, scope, args, kwargs, marks)
        out = jaxcompat.bind_jit(scoped, SCOPE_PREFIX + scope, debug, list(compress(leaves, marks)))
        out_tree, flags, others = results
        return jax.tree.unflatten(out_tree, _merged(out, flags, others))

    return nested


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _merged(traced: Sequence[Any], marks: Sequence[bool], leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves, with those marked taken from `traced`."""
    remaining = iter(traced)
    return [next(remaining) if mark else leaf for mark, leaf in zip(marks, leaves, strict=True)]


def _debug_info(
    fun: Callable[..., Any], scope: str, args: Any, kwargs: Any, marks: Sequence[bool]
) -> DebugInfo:
    """Return the argument names for the traced arguments of a function named after a scope."""
    debug = jax.api_util.debug_info("jit", fun, args, kwargs)
    _, at, place = debug.func_src_info.partition(" at ")
    return debug._replace(
        func_src_info=SCOPE_PREFIX + scope + at + place,
        arg_names=debug.arg_names and tuple(compress(debug.arg_names, marks)),
        result_paths=None,
    )


def scope_of(eqn: JaxprEqn) -> str | None:
    """Return the scope of the names in an equation of `nest`; None for any other equation."""
    name = eqn.params.get("name")
    if eqn.primitive.name == "jit" and name.startswith(SCOPE_PREFIX):
        return name.removeprefix(SCOPE_PREFIX)
    return None


# --- the primitive: its first results are its first operands ------------------------------------

#: Takes the leaves of a value and of a key, and returns the leaves of the value.
sow_p = Primitive("sow")
sow_p.multiple_results = True


@sow_p.def_impl
def _identity(*operands: Any, tree: PyTreeDef, **_: Any) -> list[Any]:
    return list(operands[: tree.num_leaves])


sow_p.def_abstract_eval(_identity)
mlir.register_lowering(sow_p, lambda _, *operands, **params: _identity(*operands, **params))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Sow the primal value but not its tangent, since the name refers to one value."""
    return sow_p.bind(*primals, **params), _identity(*tangents, **params)


ad.primitive_jvps[sow_p] = _jvp


def _transpose(cotangents: Any, *operands: Any, **_: Any) -> list[Any]:
    """Pass the cotangents through for a value sown in a linear function; a key gets none.

    Tangents of a custom rule are such values.
    """
    values, key = operands[: len(cotangents)], operands[len(cotangents) :]
    pairs = [*zip(values, cotangents, strict=True), *((x, ad.Zero(x.aval)) for x in key)]
    return [cotangent if ad.is_undefined_primal(x) else None for x, cotangent in pairs]


ad.primitive_transposes[sow_p] = _transpose


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    """Sow a value with its batch dimension moved to the front."""
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    axes = [None if axis is None else 0 for axis in axes]
    return sow_p.bind(*moved, **params), _identity(*axes, **params)


batching.primitive_batchers[sow_p] = _batch


def _shown(params: Params) -> list[tuple[str, Any]]:
    """Return what a listing shows: the tag, the name, and parameters without default values."""
    shown = [("tag", params["tag"]), ("name", params["name"])]
    if params["mode"] != "strict":
        shown.append(("mode", params["mode"]))
    if params["tree"] != LEAF:
        shown.append(("tree", params["tree"]))
    return shown


SHOWN_PARAMS["_sow_pp_rule"] = _shown
jaxcompat.add_printing_rule(sow_p, "_sow_pp_rule", _shown)
