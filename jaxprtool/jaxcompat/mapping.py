"""Tracing a function that is mapped over an axis, in one lane, as `jax.vmap` runs it.

`jax.vmap` runs the user's function under a trace that turns each equation at once into the mapped
one. The trace here writes down what is mapped, with the types of one lane, and has everything else
run at once by the trace around it: what does not depend on a mapped argument is what it is outside,
a number, an array, or a tracer of an outer transformation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax._src import api, api_util, config, core, effects, source_info_util
from jax._src import mesh as mesh_lib
from jax._src.interpreters import batching
from jax._src.interpreters import partial_eval as pe

from jaxprtool.jaxcompat.tracing import attach_constants


# JAX knows by "BatchTrace" in a trace's name that it is under a vmap, and by "DynamicJaxprTrace"
# that it is under a jit.
class _LaneBatchTrace(pe.DynamicJaxprTrace):
    """Stages what depends on mapped values, happens after such, or names the mapped axis.

    `operands` are the values that are mapped, and `dims` where, in the order of the arguments of
    the jaxpr that is written. `scope` are the name scopes outside.
    """

    __slots__ = ("axis", "dims", "operands", "ordered", "scope")

    def __init__(self, debug: Any, parent: Any, axis: Any):
        super().__init__(debug, parent_trace=parent)
        self.axis = axis
        self.operands: list[Any] = []
        self.dims: list[int] = []
        self.ordered = False
        self.scope = source_info_util.current_name_stack()

    def argument(self, value: Any, dim: int) -> Any:
        """One lane of a value that is mapped along a dimension, counted from 0."""
        self.operands.append(value)
        self.dims.append(dim)
        aval = _lane_aval(self.axis, dim, core.typeof(value))
        return self.new_arg(aval, source_info_util.current())

    def owns(self, value: Any) -> bool:
        return isinstance(value, pe.DynamicJaxprTracer) and value._trace is self

    def invalidate(self) -> None:
        super().invalidate()
        self._invalidated = True

    def stage_value(self, value: Any) -> Any:
        return value if self.owns(value) else self.parent_trace.stage_value(value)

    def process_primitive(self, primitive: Any, values: Sequence[Any], params: Any, /) -> Any:
        if not any(map(self.owns, values)):
            found = self._effects(primitive, values, params)
            if not found:
                with self._outside():
                    avals = tuple(map(core.typeof, values))
                    return primitive.bind_with_trace(self.parent_trace, values, avals, params)
            if not self._waits(found):
                return self._at_once(primitive, values, params)
        results = super().process_primitive(primitive, values, params)
        if primitive not in pe.forwarding_rules:
            return results
        return [self._unwrapped(result) for result in results]

    def process_custom_jvp_call(
        self, prim: Any, fun: Any, jvp: Any, values: Any, /, **options: Any
    ) -> Any:
        if not any(isinstance(value, core.Tracer) for value in values):
            return self._run(fun, values)
        return super().process_custom_jvp_call(prim, fun, jvp, values, **options)

    def process_custom_vjp_call(
        self, prim: Any, fun: Any, fwd: Any, bwd: Any, values: Any, /, **options: Any
    ) -> Any:
        if not any(isinstance(value, core.Tracer) for value in values):
            return self._run(fun, values)
        return super().process_custom_vjp_call(prim, fun, fwd, bwd, values, **options)

    def make_eqn(
        self, operands: Any, avals: Any, primitive: Any, params: Any, effs: Any, *rest: Any, **kw: Any
    ) -> Any:
        self.ordered = self.ordered or any(map(_is_ordered, effs))
        return super().make_eqn(operands, avals, primitive, params, effs, *rest, **kw)

    def emit_eqn(
        self, operands: Any, avals: Any, primitive: Any, params: Any, effs: Any, *rest: Any, **kw: Any
    ) -> Any:
        """What holds a function, which may close over mapped values, is seen here to do so or not."""
        if all(map(self._is_constant, operands)) and not self._waits(effs):
            with self._outside(), core.set_current_trace(self.parent_trace):
                values = map(self.get_const, operands)
                return primitive.bind(*values, **primitive.get_bind_params(params))
        return super().emit_eqn(operands, avals, primitive, params, effs, *rest, **kw)

    # --- what is not staged ---------------------------------------------------------------------

    def _run(self, fun: Any, values: Any) -> Any:
        """A function with rules of its own for derivatives, where there is nothing to derive by."""
        with core.set_current_trace(self):
            return fun.call_wrapped(*values)

    def _at_once(self, primitive: Any, values: Any, params: Any) -> Any:
        """An effect on unmapped values, which JAX's rules may refuse, or repeat for each lane."""
        rule = batching.fancy_primitive_batchers.get(primitive)
        with self._outside(), core.set_current_trace(self.parent_trace):
            if rule is None:
                return primitive.bind(*values, **params)
            results, dims = rule(self.axis, list(values), [None] * len(values), **params)
        if not primitive.multiple_results:
            return results if dims is None else self.argument(results, dims)
        return [
            result if dim is None else self.argument(result, dim)
            for result, dim in zip(results, dims, strict=True)
        ]

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """The context of what is run at once: name scopes from the outermost on."""
        stack = self.scope.transform("vmap") + source_info_util.current_name_stack()
        with (
            source_info_util.set_name_stack(stack),
            core.remove_explicit_mesh_axis_names(self.axis.explicit_mesh_axis),
        ):
            yield

    def _effects(self, primitive: Any, values: Any, params: Any) -> Any:
        """The effects that an equation would have."""
        try:
            avals = map(core.typeof, values)
            if primitive.ref_allocating:
                return primitive.abstract_eval(*avals, **params)[1]
            return pe._cached_abstract_eval(primitive, *avals, **params)[1]
        except Exception:
            return ()  # a primitive without types, or a fault, which binding it will report

    def _waits(self, effs: Any) -> bool:
        """Whether effects have to wait for others that are staged, or belong to the mapped axis."""
        return any(
            effect.name == self.axis.name
            if isinstance(effect, core.NamedAxisEffect)
            else self.ordered
            for effect in effs
        )

    def _is_constant(self, tracer: Any) -> bool:
        return isinstance(tracer.val, core.Literal) or tracer.val in self.frame.constvar_to_val

    def _unwrapped(self, value: Any) -> Any:
        """A constant that an equation gives back as it is."""
        return self.get_const(value) if self.owns(value) and self._is_constant(value) else value


def _is_ordered(effect: Any) -> bool:
    return not isinstance(effect, core.NamedAxisEffect)


def _lane_aval(axis: Any, dim: int, aval: Any) -> Any:
    """The type of one lane of a value that is mapped along a dimension."""
    aval = core.mapped_aval(axis.size, dim, aval)
    if axis.spmd_name is None or not config._check_vma.value:
        return aval
    varying = aval.mat.varying - frozenset(axis.spmd_name)
    return aval.update(manual_axis_type=aval.mat.update(varying=varying))
