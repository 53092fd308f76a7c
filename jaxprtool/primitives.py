"""Our own primitive, `sow`, and the functions that users write with it: `sow`, `variable`, `nest`.

A function that sows a value gives it a name, for a pass to find:

    def dense(key, x):
        w = variable(jax.random.normal(key, (x.shape[-1], 8)), name="w")
        return x @ w

By itself that changes nothing: `sow` is the identity under every transformation of JAX's, and
costs nothing compiled. `unzip` turns what is sown as a variable into results of one program and
arguments of another; other passes read or replace values under other tags.

The functions and their contracts are those of Oryx's `harvest` and `state.variable` (2020-2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxprtool import jaxcompat

#: What `variable` sows under.
VARIABLE = "variable"

#: What happens to values sown under one name: an error, all of them, or the last.
MODES = ("strict", "append", "clobber")

_SCOPE = "nest:"


def sow(value: Any, *, tag: str, name: str, mode: str = "strict", key: Any = None) -> Any:
    """`value`, a pytree of arrays, made known under `name` to passes that look for `tag`.

    `mode` says what several values under one name mean where they are looked for: "strict", an
    error; "append", all of them in order; "clobber", the last. The sown value depends on `key`, if
    there is one, as if it had been computed from it. Raises ValueError for a tag of None and an
    unknown mode, TypeError for a tag or name that is no string.
    """
    if tag is None:
        raise ValueError("Must provide a tag to sow under.")
    for what, text in ("tag", tag), ("name", name):
        if not isinstance(text, str | None):
            raise TypeError(f"the {what} of a sown value is a string, not {text!r}")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; there are: {', '.join(MODES)}")
    leaves, tree = jax.tree.flatten(value)
    operands = (*leaves, *jax.tree.leaves(key))
    sown = sow_p.bind(*operands, tag=tag, name=name, mode=mode, tree=tree)
    return jax.tree.unflatten(tree, sown)


def variable(value: Any, *, name: str) -> Any:
    """`value`, made known to `unzip` as the initial value of the variable `name`."""
    return sow(value, tag=VARIABLE, name=name, mode="strict")


def nest(fun: Callable[..., Any], *, scope: str) -> Callable[..., Any]:
    """`fun`, with the names that are sown inside it put under `scope`.

    In a jaxpr it is a `jit` call whose name says so; run eagerly it is `fun` itself. Raises
    TypeError for a scope that is no string.
    """
    if not isinstance(scope, str):
        raise TypeError(f"a scope is a string, not {scope!r}")

    @functools.wraps(fun)
    def nested(*args: Any, **kwargs: Any) -> Any:
        if not jaxcompat.is_staging():
            return fun(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        # What is no tracer may be of any type, and steer the Python code: it stays as it is.
        traced = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)}

        def scoped(traced: dict[int, Any]) -> Any:
            given = [traced.get(i, leaf) for i, leaf in enumerate(leaves)]
            inner_args, inner_kwargs = jax.tree.unflatten(tree, given)
            return fun(*inner_args, **inner_kwargs)

        scoped.__name__ = scoped.__qualname__ = _SCOPE + scope
        return jax.jit(scoped)(traced)

    return nested


def scope_of(eqn: Any) -> str | None:
    """The scope that an equation of `nest` puts names under; None for every other equation."""
    name = eqn.params.get("name")
    if eqn.primitive.name == "jit" and name.startswith(_SCOPE):
        return name.removeprefix(_SCOPE)
    return None


# --- the primitive: its first results are its first operands ------------------------------------

#: Takes the leaves of a value and of a key, and gives those of the value.
sow_p = Primitive("sow")
sow_p.multiple_results = True


@sow_p.def_impl
def _identity(*operands: Any, tree: Any, **_: Any) -> list[Any]:
    return list(operands[: tree.num_leaves])


sow_p.def_abstract_eval(_identity)
mlir.register_lowering(sow_p, lambda _, *operands, **params: _identity(*operands, **params))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The value is sown, and its tangent is not: the name stands for one value."""
    return sow_p.bind(*primals, **params), _identity(*tangents, **params)


ad.primitive_jvps[sow_p] = _jvp


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    """A sown value has its mapped axis first, wherever JAX happens to carry it."""
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    axes = [None if axis is None else 0 for axis in axes]
    return sow_p.bind(*moved, **params), _identity(*axes, **params)


batching.primitive_batchers[sow_p] = _batch
