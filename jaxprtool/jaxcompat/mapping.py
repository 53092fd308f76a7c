"""Trace a function that is mapped over an axis for one batch element, as `jax.vmap` runs it.

The trace stages equations on mapped values, with the types of one batch element. The enclosing
trace runs everything else immediately. So a value that does not depend on a mapped argument is the
same as outside: a number, an array, or a tracer of an outer transformation.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax._src import api, api_util, config, core, dtypes, literals
from jax._src.interpreters import batching
from jax._src.interpreters import partial_eval as pe
from jax.extend import linear_util as lu
from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    mapped_aval,
    new_jaxpr_eqn,
    set_current_trace,
)
from jax.interpreters.batching import fancy_primitive_batchers
from jax.interpreters.partial_eval import DynamicJaxprTracer, dce_jaxpr, dce_rules
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.custom_rules import ClosedOver, derivatives_around, unperturbed
from jaxprtool.jaxcompat.jaxprs import (
    Atom,
    Aval,
    Effect,
    MappedAxis,
    Params,
    mentions_symbols,
    open_jaxpr,
    replace_jaxpr,
)
from jaxprtool.jaxcompat.marks import for_jax
from jaxprtool.jaxcompat.tracing import attach_constants, is_staging, names_axis, renamed_effects


class _ElementTracer(DynamicJaxprTracer):
    """A staged value. If it turns out not to be mapped, Python may read it.

    A jit or a loop may have mapped operands and a result that depends on none of them. JAX's vmap
    has run it before Python reads the result.
    """

    __slots__ = ()

    def to_concrete_value(self) -> Any:
        return self._trace.concrete(self)

    def __float__(self) -> float:
        value = self.to_concrete_value()
        return super().__float__() if value is None else float(value)

    def __complex__(self) -> complex:
        value = self.to_concrete_value()
        return super().__complex__() if value is None else complex(value)

    def __array__(self, *args: Any, **options: Any) -> Any:
        value = self.to_concrete_value()
        if value is None:
            return super().__array__(*args, **options)
        return np.asarray(value, *args, **options)


class _ElementTrace(pe.DynamicJaxprTrace):
    """Stages equations that depend on mapped values, or have an effect after one that does.

    See `docs/jax_internals.md` for why it derives from a class that is not public in JAX.

    `operands` are the mapped values, and `dims` their mapped dimensions, in the order of the
    arguments of the jaxpr. `scope` are the name scopes outside.
    """

    parent_trace: Any

    def __init__(self, debug: DebugInfo, parent: Any, axis: MappedAxis):
        super().__init__(debug, parent_trace=parent)
        self.axis = axis
        self.operands: list[Any] = []
        self.dims: list[int] = []
        self.ordered = False  # whether an equation with an ordered effect is staged
        self.tentative = False  # whether the next equation may depend on no mapped value
        self.scope = source_info_util.current_name_stack()
        self.rules = ClosedOver(self.owns, derivatives_around(parent))
        self.runs = not is_staging()  # whether the enclosing trace computes values
        self.maybe_unmapped: set[Any] = set()  # staged variables
        self.known: dict[Any, Any] = {}  # the values of these that were evaluated; None if mapped
        self.symbolic = False  # whether sizes of values have symbols

    def __repr__(self) -> str:
        # JAX reads the names of its traces here, to tell whether it is under a `vmap` or a `jit`.
        return "BatchTrace"

    def argument(self, value: object, dim: int) -> Any:
        """Return one element of a value that is mapped along a non-negative dimension."""
        return self.staged(value, _element_aval(self.axis, dim, jax.typeof(value)), dim)

    def staged(self, value: object, aval: Aval, dim: int = 0) -> Any:
        """Return one element, of this type, of a value."""
        self.operands.append(value)
        self.dims.append(dim)
        return self.new_arg(aval, source_info_util.current())

    def owns(self, value: object) -> bool:
        return isinstance(value, DynamicJaxprTracer) and value._trace is self

    def invalidate(self) -> None:
        super().invalidate()
        jax.core.Trace.invalidate(self)  # JAX's own tracing to jaxprs omits this
        self.operands.clear()  # derivatives of custom functions may keep the trace alive
        self.known.clear()
        self.parent_trace = None

    def stage_value(self, value: object) -> Any:
        return value if self.owns(value) else self.parent_trace.stage_value(value)

    def process_primitive(
        self, primitive: Primitive, values: Sequence[Any], params: Params, /
    ) -> Any:
        for value in values:
            if isinstance(value, DynamicJaxprTracer) and value._trace is self:
                break
        else:
            effs = self._effects(primitive, values, params)
            if not (self._must_be_staged(effs) or self._mentions_symbols(params, values)):
                return self._evaluate_now(primitive, values, params, bool(effs))
        return super().process_primitive(primitive, values, params)

    # Primitives that take functions. These may close over mapped values, so only tracing them
    # shows whether the equation depends on one: `emit_eqn` gets all of its dependencies.

    def process_custom_jvp_call(
        self, prim: Primitive, fun: object, jvp: Any, values: Any, /, **options: Any
    ) -> Any:
        if not any(isinstance(value, jax.core.Tracer) for value in values):
            return self._run(fun, values)
        with self._tentatively(fun, jvp):
            return super().process_custom_jvp_call(prim, fun, jvp, values, **options)

    def process_custom_vjp_call(
        self, prim: Primitive, fun: object, fwd: Any, bwd: Any, values: Any, /, **options: Any
    ) -> Any:
        if not any(isinstance(value, jax.core.Tracer) for value in values):
            return self._run(fun, values)
        with self._tentatively(fun, fwd):
            return super().process_custom_vjp_call(prim, fun, fwd, bwd, values, **options)

    def process_shard_map(self, *args: Any, **options: Any) -> Any:
        with self._tentatively():
            return super().process_shard_map(*args, **options)

    def process_call(self, *args: Any) -> Any:  # JAX 0.10
        with self._tentatively():
            return super().process_call(*args)

    def make_eqn(
        self, operands: Any, avals: Any, primitive: Any, params: Any, effs: Any, *a: Any, **kw: Any
    ) -> Any:
        if effs and not self.ordered:
            self.ordered = any(map(_is_ordered, effs))
        if config._check_vma.value:
            avals = [_unvarying(aval, {self.axis.name}) for aval in avals]
        eqn, results = super().make_eqn(operands, avals, primitive, params, effs, *a, **kw)
        runs = self.runs and not self._mentions_symbols(params)
        if runs and (
            (len(results) > 1 and primitive in dce_rules)
            or all(self._is_constant(t) or t.val in self.maybe_unmapped for t in operands)
        ):
            self.maybe_unmapped.update(eqn.outvars)
        return eqn, results

    def var_to_tracer(self, var: Var, source: Any, parent: Any = None) -> Any:
        if getattr(var.aval, "has_qdd", False):
            return super().var_to_tracer(var, source, parent)
        return _ElementTracer(self, var.aval, var, source, parent)

    def emit_eqn(
        self, operands: Any, avals: Any, primitive: Any, params: Any, effs: Any, *a: Any, **kw: Any
    ) -> Any:
        if self.rules.depth and "num_consts" in params:
            operands, params = self._closing_over(operands, avals, primitive, params, effs)
        if (
            self.tentative
            and all(map(self._is_constant, operands))
            and not (self._must_be_staged(effs) or names_axis(params, self.axis.name))
            and not self._mentions_symbols(params)
        ):
            with self._outside(), set_current_trace(self.parent_trace):
                values = map(self.get_const, operands)
                return list(primitive.bind(*values, **primitive.get_bind_params(params)))
        return super().emit_eqn(operands, avals, primitive, params, effs, *a, **kw)

    def _closing_over(
        self, operands: Any, avals: Sequence[Aval], primitive: Primitive, params: Params, effs: Any
    ) -> tuple[Any, Params]:
        """Return the operands and parameters of a call with custom derivatives, closures included.

        The values that its rules close over become operands. If a rule raises here, it raises again
        when the call is differentiated.
        """
        ins, outs = [Var(x.aval) for x in operands], list(map(Var, avals))
        eqn = new_jaxpr_eqn(ins, outs, primitive, params, effs)
        try:
            values = self.rules.values(eqn)
        except Exception:
            values = []
        if not values:
            return operands, params
        params = self.rules.params(eqn, values)
        with set_current_trace(self):
            values = [
                self.to_jaxpr_tracer(unperturbed(x), source_info_util.current()) for x in values
            ]
        return [*operands, *values], params

    @contextmanager
    def _tentatively(self, *functions: Any) -> Iterator[None]:
        """Stage an equation that may turn out to depend on no mapped value.

        JAX stores outputs on a function and on its derivative, and reads them from the one that has
        run. If both have run, as when the equation is also run and differentiated immediately, it
        must read the derivative's.
        """
        self.tentative = True
        try:
            yield
        finally:
            self.tentative = False
        if functions and all(map(_has_run, functions)):
            for store in filter(None, functions[0].stores):
                store.reset()

    def concrete(self, tracer: Any) -> Any:
        """Return the value of a tracer, or None if it is mapped or has no value."""
        if tracer.val not in self.maybe_unmapped:
            return None
        if tracer.val not in self.known:
            self.known[tracer.val] = self._value(tracer)
        value = self.known[tracer.val]
        return value.to_concrete_value() if isinstance(value, jax.core.Tracer) else value

    def _value(self, tracer: Any) -> Any:
        """Evaluate a tracer from constants by equations without effects; None if impossible."""
        closed = self.closed([tracer])
        pure = replace_jaxpr(closed, eqns=[eqn for eqn in closed.eqns if not eqn.effects])
        needed, used = dce_jaxpr(open_jaxpr(pure), [True])
        bound = {*closed.constvars}.union(*(eqn.outvars for eqn in needed.eqns))
        read = {v for eqn in needed.eqns for v in eqn.invars if isinstance(v, Var)}
        if any(used) or not {*read, *needed.outvars} <= bound:
            return None
        with self._outside(), set_current_trace(self.parent_trace):
            return jax.core.eval_jaxpr(needed, closed.consts)[0]

    def closed(self, results: Sequence[Any]) -> ClosedJaxpr:
        """Return the closed jaxpr of the staged equations; its constants are closed-over values."""
        debug = self.frame.debug_info._replace(arg_names=None, result_paths=None)
        return attach_constants(*self.to_jaxpr(list(results), debug, source_info_util.current()))

    # --- equations that are not staged ----------------------------------------------------------

    def _run(self, fun: lu.WrappedFun, values: Any) -> Any:
        """Run a function with custom derivatives where no operand is traced."""
        with set_current_trace(self):
            return fun.call_wrapped(*values)

    def _evaluate_now(
        self, primitive: Primitive, values: Any, params: Params, has_effects: bool
    ) -> Any:
        """Evaluate an equation on unmapped values.

        If it may name the axis, or has an effect, JAX's batching rule decides: the result may
        differ between batch elements, be refused, or happen once for each of them.
        """
        rule = None
        if has_effects or self.axis.name is not core.no_axis_name:
            rule = fancy_primitive_batchers.get(primitive)
        with self._outside():
            if rule is None:
                avals = tuple(map(jax.typeof, values))
                return primitive.bind_with_trace(self.parent_trace, values, avals, params)
            with set_current_trace(self.parent_trace):
                results, dims = rule(self.axis, list(values), [None] * len(values), **params)
        if not primitive.multiple_results:
            return results if dims is None else self.argument(results, dims)
        return [
            result if dim is None else self.argument(result, dim)
            for result, dim in zip(results, dims, strict=True)
        ]

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Enter the context of the enclosing trace, with the name scopes from the outermost on."""
        stack = self.scope.transform("vmap") + source_info_util.current_name_stack()
        with (
            source_info_util.set_name_stack(stack),
            core.remove_explicit_mesh_axis_names(self.axis.explicit_mesh_axis),
        ):
            yield

    def _effects(self, primitive: Primitive, values: Any, params: Params) -> Any:
        """Return the effects that an equation would have."""
        try:
            avals = map(jax.typeof, values)
            if primitive.ref_allocating:
                return primitive.abstract_eval(*avals, **params)[1]
            return pe._cached_abstract_eval(primitive, *avals, **params)[1]
        except Exception:
            return ()  # a primitive without types, or an error, which binding it will report

    def _mentions_symbols(self, params: Params, values: Sequence[Any] = ()) -> bool:
        """Return True if an equation has sizes that may differ between batch elements."""
        return self.symbolic and (mentions_symbols(params) or mentions_symbols(values))

    def _must_be_staged(self, effs: Iterable[Effect]) -> bool:
        """Return True if effects must come after others that are staged."""
        return self.ordered and any(map(_is_ordered, effs))

    def _is_constant(self, tracer: Any) -> bool:
        return isinstance(tracer.val, Literal) or tracer.val in self.frame.constvar_to_val


def _has_run(function: lu.WrappedFun) -> bool:
    """Return True if a wrapped function has run and has stored its auxiliary outputs."""
    try:
        return bool([store.val for store in function.stores if store is not None])
    except lu.StoreException:
        return False


def _is_ordered(effect: Effect) -> bool:
    return not isinstance(effect, core.NamedAxisEffect)


def _element_aval(axis: MappedAxis, dim: int, aval: Aval) -> Aval:
    """Return the type of one element of a value that is mapped along a dimension."""
    aval = mapped_aval(axis.size, dim, aval)
    return _unvarying(aval, axis.spmd_name) if axis.spmd_name and config._check_vma.value else aval


def _unvarying(aval: Aval, names: Any) -> Aval:
    """Return a type without these manual axes, over which one batch element does not vary."""
    if not isinstance(aval, jax.core.ShapedArray) or aval.mat.varying.isdisjoint(names):
        return aval
    return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying - {*names}))


class TracedElement:
    """A function traced for one batch element: its operands, its context, and its results.

    Args:
        axis: The mapped axis, an `axis_data`.
        debug: The debug info of the function.

    Attributes:
        operands: The values that the jaxpr takes.
        dims: The mapped dimension of each operand.
    """

    def __init__(self, axis: MappedAxis, debug: DebugInfo):
        self._trace = _ElementTrace(debug, core.trace_ctx.trace, axis)
        self.operands, self.dims = self._trace.operands, self._trace.dims

    def elements(self, values: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Return one element of each value; registered types define their own elements."""
        trace = self._trace

        @cache
        def index() -> Any:
            return trace.argument(batching.make_iota(trace.axis.size), 0)

        def element(value: object, spec: Any) -> Any:
            handler = batching.to_elt_handlers.get(type(value))
            if handler:
                return handler(element, index, value, spec)
            if spec is None:
                return value
            return trace.argument(value, operator.index(spec) % len(jax.typeof(value).shape))

        return list(map(element, values, specs))

    def element(self, value: object, aval: Aval) -> Any:
        """Return one element, of a given type, of a value. The type may have symbolic sizes."""
        self._trace.symbolic = True
        return self._trace.staged(value, aval)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter the context in which the function is run, and in which its tracers may be used."""
        axis = self._trace.axis
        with (
            set_current_trace(self._trace),
            core.extend_axis_env_nd([(axis.name, axis.size)]),
            core.add_spmd_axis_names(axis.spmd_name),
            core.add_explicit_mesh_axis_names(axis.explicit_mesh_axis),
            source_info_util.set_name_stack(source_info_util.NameStack()),
        ):
            yield

    def holds(self, value: object) -> bool:
        """Return True if a value is a tracer of this trace, which is mapped, or may be."""
        return self._trace.owns(value)

    def jaxpr(self, results: Sequence[Any]) -> ClosedJaxpr:
        """Return the closed jaxpr of the trace; its constants are the closed-over values."""
        return self._trace.closed(results)

    def close(self) -> None:
        """End the life of the tracers; JAX checks that they have ended if configured to."""
        with core.ensure_no_leaks(self._trace):
            del self._trace


def assembled(axis: MappedAxis, result: Any, spec: Any, leaf: Callable[[Any, Any], Any]) -> Any:
    """Return the batched result from that of one element; a registered type assembles its parts.

    `leaf(part, spec)` returns each part for all batch elements, mapped along `spec`.
    """
    handler = batching.from_elt_handlers.get(type(result))
    if handler is None:
        return leaf(result, spec)
    return handler(lambda _, part, spec: assembled(axis, part, spec, leaf), axis.size, result, spec)


def is_vmappable(value: object) -> bool:
    """Return True for a value of a type that is registered with `register_vmappable`."""
    return type(value) in batching.vmappables


def is_element(value: object) -> bool:
    """Return True if a value represents one batch element of a registered type."""
    return type(value) in batching.from_elt_handlers


def vmappable_specs() -> tuple[type, ...]:
    """Return the types, besides int, of the axis specs of registered types."""
    return tuple({spec for spec, _ in batching.vmappables.values()})


def check_refs(debug: DebugInfo, values: Sequence[Any], axes: Sequence[Any]) -> None:
    """Check that no argument is a view of a ref, and that no ref occurs twice.

    Raises TypeError and ValueError.
    """
    api_util.check_no_transformed_refs_args(lambda: debug, values)
    if jax.config.jax_mutable_array_checks:
        avals = [
            None if axis is None or is_vmappable(value) else jax.typeof(value)
            for value, axis in zip(values, axes, strict=True)
        ]
        api_util.check_no_aliased_ref_args(lambda: debug, avals, values)


def mapped_mesh_axes(values: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the axes of an explicit mesh that the mapped dimension is sharded over, or None.

    Raises ValueError if values disagree, or if an unmapped one is sharded over them too.
    """
    names = api._mapped_axis_spec(values, axes)
    api._check_ema_unmapped_args(names, values, axes)
    return names


def spmd_axis_names(names: Any, mesh_axes: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return `spmd_axis_name` of a vmap as a tuple; None if the arguments' sharding implies it.

    Raises ValueError if the two differ.
    """
    if names is None:
        return None
    names = names if isinstance(names, tuple) else (names,)
    if mesh_axes is None:
        return names
    if jax.remove_size_one_mesh_axis_from_type.value:
        sizes = jax.sharding.get_abstract_mesh().shape
        names = tuple(name for name in names if sizes[name] != 1)
    if names == mesh_axes:
        return None
    raise ValueError(
        "Only one of spmd_axis_name or arrays sharded on `Explicit` mesh axis type is allowed. "
        f"Got spmd_axis_name={names} and arrays sharded on explicit_mesh_axis={mesh_axes}"
    )


#: The types of literals in JAX's evaluator, also in a call's body.
_LITERALS = (bool, int, float, complex, literals.TypedNdArray)


def evaluated(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr, or write its equations if JAX is tracing, and return the results."""
    closed = for_jax(closed)
    trace = core.trace_ctx.trace
    jaxpr = open_jaxpr(closed)
    if type(trace) is not pe.DynamicJaxprTrace or (jaxpr.is_high and trace.requires_low):
        outs = jax.core.eval_jaxpr(jaxpr, closed.consts, *operands)
        return [jnp.asarray(x) if isinstance(x, _LITERALS) else x for x in outs]
    return _inlined(trace, closed, operands)


def _inlined(trace: Any, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Write a jaxpr's equations into the one being traced, as if they were evaluated.

    The equations are typed already, and no transformation is between them and the jaxpr. The frame
    takes the same equation objects, as when JAX lowers a jaxpr, unless they read outside values: an
    equation made for the frame keeps those alive. A frame that drops dead equations (`auto_dce`)
    holds only equations made for it.
    """
    source = source_info_util.current()
    scopes, frame = source.name_stack, trace.frame
    frame.is_high |= open_jaxpr(closed).is_high  # whether JAX replaces some before it compiles
    values = [*closed.consts, *operands]
    tracers = [trace.to_jaxpr_tracer(dtypes.canonicalize_value(x), source) for x in values]
    env = dict(zip([*closed.constvars, *closed.invars], tracers, strict=True))
    folded, written = pe.const_fold_rules, frame.tracing_eqns

    def read(atom: Atom) -> Any:
        tracer = None if type(atom) is Literal else env.get(atom)
        if tracer is None:
            tracer = DynamicJaxprTracer(trace, atom.aval, atom, source)
        return tracer

    for eqn in closed.eqns:
        if scopes.stack:
            where = eqn.source_info.replace(name_stack=scopes + eqn.source_info.name_stack)
            eqn = eqn.replace(source_info=where)
        if frame.auto_dce or eqn.primitive in folded:
            outs = _emitted(trace, eqn, list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        for atom in eqn.invars:
            if type(atom) is not Literal and atom in env:
                written.append(_in_frame(eqn, list(map(read, eqn.invars))))
                break
        else:
            written.append(eqn)
    return list(map(read, closed.outvars))


def _emitted(trace: Any, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Emit an equation like one that JAX traces, and return the tracers of its results."""
    avals = [v.aval for v in eqn.outvars]
    consts = pe.try_constant_folding(eqn.primitive, operands, eqn.params, avals)
    where, effs = eqn.source_info, eqn.effects
    if consts is not None:
        return [trace.new_const(x, where, aval) for x, aval in zip(consts, avals, strict=True)]
    effs = effs and _renamed_effects(eqn, operands)
    return trace.emit_eqn(operands, avals, eqn.primitive, eqn.params, effs, where, eqn.ctx)


def _in_frame(eqn: JaxprEqn, operands: list[Any]) -> Any:
    """Return an equation in the form of a frame, which reads tracers and has the same results."""
    effs = eqn.effects and _renamed_effects(eqn, operands)
    return pe.TracingEqn(
        operands, eqn.outvars, eqn.primitive, eqn.params, effs, eqn.source_info, eqn.ctx
    )


def _renamed_effects(eqn: JaxprEqn, operands: list[Any]) -> set[Any]:
    """Return the effects of an equation on these operands, with refs renamed to them."""
    pairs = zip(eqn.invars, operands, strict=True)
    return renamed_effects(eqn.effects, {v: t.val for v, t in pairs if type(v) is Var})


# --- pmapped --------------------------------------------------------------------------------------
# Find the user's function in the function of flat arrays that `jax.pmap` gives to `jax.jit`.


@dataclass(frozen=True)
class MappedCall:
    """A call of a function under `jax.pmap`.

    Attributes:
        fun: The user's function.
        tree: The tree of its arguments, `(args, kwargs)`, without those that are static.
        statics: The values of static arguments, by position.
    """

    fun: Callable[..., Any]
    tree: PyTreeDef
    statics: dict[int, object]


def mapped_call(fun: Any) -> MappedCall | None:
    """Return the user's call that `jax.pmap` gives to `jax.jit`, or None for another function."""
    inner = vars(fun).get("__wrapped__") if type(fun) is types.FunctionType else None
    if type(inner) is not types.FunctionType or inner.__module__ != "jax._src.pmap":
        return None
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    closure: dict[str, Any] = {name: cell.cell_contents for name, cell in cells}
    wrapped, statics = closure["fun"], dict[int, object]()
    for _, parameters in wrapped.transforms:
        dynamic, fixed = parameters
        places = set(range(len(dynamic) + len(fixed))) - set(dynamic)
        statics |= dict(zip(sorted(places), (static.val for static in fixed), strict=True))
    return MappedCall(wrapped.f, closure["in_tree"], statics)
