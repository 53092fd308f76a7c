"""JAX's type checker, for jaxprs and for one equation, and the primitives that are registered."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax._src import config, core, pjit
from jax._src.interpreters import ad, mlir
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive

from jaxprtool.jaxcompat.jaxprs import Atom, axes_bound


def registered_primitives() -> dict[str, Primitive]:
    """The primitives that JAX can run, differentiate or check, by name; plug-ins' own included."""
    tables: list[Iterable[Any]] = [
        mlir._lowerings,
        *mlir._platform_specific_lowerings.values(),
        ad.primitive_jvps,
        core.custom_typechecks,
        pe.dce_rules,
    ]
    return {primitive.name: primitive for table in tables for primitive in table}


_checking = threading.Lock()


def check_jaxpr(jaxpr: Any) -> None:
    """Check an open jaxpr with JAX's type checker, and each body in it once.

    JAX's checks a body at each call of it, which takes time in proportion to the calls when all
    are inlined. Raises what the checker raises.
    """
    checked: set[Any] = set()

    def once(body: Any) -> None:
        request = body, config.trace_context()
        if request not in checked:
            original(body)
            checked.add(request)

    with _checking:
        original = core.check_jaxpr
        core.check_jaxpr = once
        try:
            once(jaxpr)
        finally:
            core.check_jaxpr = original


def inferred_types(
    primitive: Primitive, params: dict[str, Any], operands: Sequence[Atom]
) -> tuple[list[Any], set[Any]]:
    """The types of an equation's results, and its effects, as JAX's type checker finds them.

    The effects are those of an equation on these operands. The equation's bodies are not checked,
    nor how they fit the operands of a jit. Raises what the primitive's rule raises.
    """
    rule = core.custom_typechecks.get(primitive)
    if rule is None and primitive.call_primitive:
        results, effs = core._check_call(_names_for_printing, primitive, operands, params)
    elif rule is None or primitive is pjit.jit_p:
        results, effs = primitive.abstract_eval(*(x.aval for x in operands), **params)
        results = results if primitive.multiple_results else [results]
    else:
        results, effs = rule(_names_for_printing, *operands, **params)
    return list(results), core.resolve_input_effects(effs, operands)


def _names_for_printing() -> tuple[Any, Any]:
    return core.JaxprPpContext(), core.JaxprPpSettings()


def fits(declared: Any, actual: Any) -> bool:
    """Whether a variable of one type may stand for a value of another; weak types aside."""
    return core.typecompat(declared, actual)


@contextmanager
def inside_shard_map(
    mesh: Any, newly_manual_axes: frozenset[Any], check_vma: bool, **_: Any
) -> Iterator[None]:
    """The setting in which the body of a `shard_map` with these parameters is traced."""
    axes = newly_manual_axes | set(mesh.manual_axes)
    sizes = [(name, size) for name, size in mesh.shape.items() if name in axes]
    with axes_bound(sizes), config._check_vma(check_vma):
        yield
