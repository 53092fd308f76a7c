"""Marked calls, which XLA must not inline: their marks, their form, and their lowering.

XLA does not inline a marked call. A *unit* is also compiled separately, once for all calls of equal
bodies. JAX writes the marks on the call as attributes for XLA, and its transformations preserve
them. See `marked_calls` for the form that JAX gets, and `marked_lowering` for the lowering.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from operator import is_not
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax._src import config, pjit
from jax._src.interpreters.mlir import TracebackCaches
from jax._src.random import threefry2x32
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxprs_in_params
from jax.extend.core import jaxpr_as_fun as _jaxs_function
from jax.extend.core.primitives import conv_general_dilated_p, jit_p, threefry2x32_p
from jax.interpreters import mlir

from jaxprtool.jaxcompat.jaxprs import AnyJaxpr, open_jaxpr, rebound, replace_jaxpr, with_metadata

# --- marks ----------------------------------------------------------------------------------------
# Marks of calls that XLA must not inline: metadata of the equation.

#: The marks: none, a call that is not inlined, or a unit.
Mark = Literal["plain", "call", "unit"]

#: From the weakest to the strongest: each adds one key for XLA.
MARKS: tuple[Mark, ...] = ("plain", "call", "unit")
_KEYS = "inlineable", "compilation_unit"

#: The key for the name of a marked call's body, which identifies the call as ours.
_OUTLINED = "outlined"


class MarkedName(str):
    """The name of a jit that JAX gets as a marked call: it is copied wherever the call's name is.

    JAX's transformations pass it on unchanged, and only to calls derived from this one.
    """

    mark: Mark
    body: str

    def __new__(cls, name: str, mark: Mark, body: str) -> MarkedName:
        """Return the name of a call with this mark, whose body has the name `body`."""
        marked = super().__new__(cls, name)
        marked.mark, marked.body = mark, body
        return marked


def marked(context: Any, mark: Mark, name: str) -> Any:
    """Return the context of an equation with the mark of a call, whose body has the name `name`.

    Bodies that call one another have different names; XLA distinguishes bodies by their contents.
    """
    others = dict.fromkeys([*_KEYS, _OUTLINED])
    return with_metadata(context, {**others, **metadata_of(mark, name)})


def metadata_of(mark: Mark, name: str) -> dict[str, str]:
    """Return the metadata of a call with this mark, whose body has this name."""
    return {} if mark == "plain" else {**metadata_for_xla(mark, name), _OUTLINED: name}


def metadata_for_xla(mark: Mark, name: str) -> dict[str, str]:
    """Return the part of the metadata that is for XLA."""
    return dict(list(zip(_KEYS, ("false", name), strict=True))[: MARKS.index(mark)])


def mark_of(eqn: JaxprEqn) -> Mark:
    """Return the mark that `marked` has set on a call; "plain" if none, or if it is not a jit.

    JAX's transformations copy the mark of a call to the equations that they write within it.
    """
    return mark_in(eqn.ctx) if eqn.primitive is jit_p else "plain"


def marked_name(eqn: JaxprEqn) -> str | None:
    """Return the body name that `marked` has set on an equation, or None."""
    return name_in(eqn.ctx)


def convolves(jaxpr: AnyJaxpr, *, in_units: bool = True) -> bool:
    """Return True if a body holds a convolution, at any depth; optionally except within units."""
    return any(
        eqn.primitive is conv_general_dilated_p
        or any(convolves(body, in_units=in_units) for body in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
        if in_units or mark_of(eqn) != "unit"
    )


def name_in(context: Any) -> str | None:
    """Return the body name in the context of an equation, or None."""
    return (context.xla_metadata or {}).get(_OUTLINED)


def mark_in(context: Any) -> Mark:
    """Return the mark of a call with this context."""
    if name_in(context) is None:
        return "plain"
    return "unit" if "compilation_unit" in context.xla_metadata else "call"


# --- marked calls ---------------------------------------------------------------------------------
# Marked calls in JAX's form: equations of a primitive of our own, with its own lowering.
#
# In a Program a marked call is a `jit` whose context has the mark. JAX would copy the mark to the
# call and to all equations that its transformations trace in the body, wherever the program is
# lowered. So the jaxpr that JAX evaluates or lowers has equations of another primitive, which
# follows the rules of `jit` except for the lowering. After JAX's tracing, they become `jit` with a
# mark again.


class MarkedCall(Primitive):
    """JAX's `jit`, lowered according to its mark. Its name is a `MarkedName`."""

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        """Bind it, or bind a `jit` if another package's transformation has rules only for that."""
        of_jax = type(trace).__module__.startswith(("jax._src.", "jaxprtool."))
        if of_jax:
            return super().bind_with_trace(trace, args, avals, params)
        params = {**params, "name": str(params["name"])}
        return jit_p.bind_with_trace(trace, args, avals, params)


@cache
def marked_call_p() -> MarkedCall:
    """Return the primitive. JAX's tables have rows for it from the first marked call on."""
    primitive = MarkedCall(jit_p.name)
    module = SimpleNamespace(**{**vars(pjit), "jit_p": primitive})
    for name, value in vars(jit_p).items():
        setattr(primitive, name, rebound(value, jit_p=primitive))
    for table in _tables_with_jit():
        table[primitive] = rebound(table[jit_p], jit_p=primitive, pjit=module)
    mlir.register_lowering(primitive, lower_marked_call, cacheable=False)
    return primitive


def _tables_with_jit() -> Iterator[dict[Any, Any]]:
    """Yield JAX's tables that have a rule for `jit`."""
    import jax.experimental.checkify  # noqa: F401  (so that its table is among them)

    modules = [module for name, module in sys.modules.items() if name.startswith("jax.")]
    tables = {id(x): x for m in modules for x in list(vars(m).values()) if isinstance(x, dict)}
    yield from (table for table in tables.values() if jit_p in table)


# --- conversions ----------------------------------------------------------------------------------

_Known: TypeAlias = WeakKeyDictionary[AnyJaxpr, dict[tuple[type, str | None], AnyJaxpr | None]]

#: The converted jaxprs, by the marked body around them; None for those that do not change.
_for_jax: _Known = WeakKeyDictionary()
_from_jax: _Known = WeakKeyDictionary()

#: Both caches, for functions that empty caches.
CONVERTED = _for_jax, _from_jax


def for_jax(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a jaxpr, open or closed, for JAX to evaluate or lower; itself if unmarked.

    The same jaxpr is converted to the same object, and so are shared bodies.
    """
    if not _may_have_marks(jaxpr):
        return jaxpr
    return _mapped(jaxpr, None, _equation_for_jax, _for_jax)


#: By open jaxpr: what `_may_have_marks` returns. A WeakKeyDictionary takes three times as long.
_marks_known: dict[weakref.ref[Jaxpr], bool] = {}


def _may_have_marks(jaxpr: AnyJaxpr) -> bool:
    """Return True if an equation has metadata for XLA, at any depth. Fast: all traces call it."""
    body = open_jaxpr(jaxpr)
    known = _marks_known.get(weakref.ref(body))
    if known is None:
        known = any(map(_may_have_mark, body.eqns))
        _marks_known[weakref.ref(body, _marks_known.pop)] = known
    return known


def _may_have_mark(eqn: JaxprEqn) -> bool:
    if eqn.ctx.xla_metadata:
        return True
    if eqn.primitive is jit_p:
        return _may_have_marks(eqn.params["jaxpr"])
    if isinstance(eqn.primitive, MarkedCall):
        return True
    holds = any(map(_holds_jaxpr, eqn.params.values()))
    return holds and any(map(_may_have_marks, jaxprs_in_params(eqn.params)))


def from_jax(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a jaxpr traced by JAX, with its marked calls as `jit`: the inverse of `for_jax`."""
    if not marked_call_p.cache_info().currsize:
        return jaxpr
    return _mapped(jaxpr, None, _equation_from_jax, _from_jax)


def equation_for_jax(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation for JAX to evaluate: `for_jax` of one equation."""
    return _equation_for_jax(eqn, None)


_Rule: TypeAlias = Callable[[JaxprEqn, str | None], JaxprEqn]


def _mapped(jaxpr: AnyJaxpr, around: str | None, rule: _Rule, cache: _Known) -> AnyJaxpr:
    """Apply a rule to the equations of a jaxpr; `around` is the name of the marked body."""
    # In JAX 0.10 each view of an open body closes it again. Only the open jaxpr stays the same
    # object.
    lasting = jaxpr if getattr(jaxpr, "consts", ()) else open_jaxpr(jaxpr)
    results, key = cache.setdefault(lasting, {}), (type(jaxpr), around)
    if key not in results:
        eqns = [rule(eqn, around) if _may_change(eqn) else eqn for eqn in jaxpr.eqns]
        changed = any(map(is_not, eqns, jaxpr.eqns))
        results[key] = replace_jaxpr(jaxpr, eqns=eqns) if changed else None
    return results[key] or jaxpr


def _may_change(eqn: JaxprEqn) -> bool:
    """Return True for a marked call, or an equation with jaxprs. Fast, as all traces call it."""
    if eqn.ctx.xla_metadata or isinstance(eqn.primitive, MarkedCall):
        return True
    return any(map(_holds_jaxpr, eqn.params.values()))


def _holds_jaxpr(value: object) -> bool:
    if type(value) is tuple:
        return not _JAXPRS.isdisjoint(map(type, value))
    return type(value) in _JAXPRS


def _equation_for_jax(eqn: JaxprEqn, around: str | None) -> JaxprEqn:
    if eqn.ctx.xla_metadata and (name := name_in(eqn.ctx)) is not None:
        mark = mark_in(eqn.ctx)
        eqn = eqn.replace(ctx=marked(eqn.ctx, "plain", name))
        # JAX's transformations copy the mark of a call to all equations within it.
        if eqn.primitive is jit_p and name != around:
            params = {**eqn.params, "name": MarkedName(eqn.params["name"], mark, name)}
            eqn = eqn.replace(primitive=marked_call_p(), params=params)
        around = name
    return _with_bodies(eqn, lambda body: _mapped(body, around, _equation_for_jax, _for_jax))


def _equation_from_jax(eqn: JaxprEqn, _: str | None) -> JaxprEqn:
    if isinstance(eqn.primitive, MarkedCall):
        name = eqn.params["name"]
        context = marked(eqn.ctx, name.mark, name.body)
        params = {**eqn.params, "name": str(name)}
        eqn = eqn.replace(primitive=jit_p, params=params, ctx=context)
    return _with_bodies(eqn, lambda body: _mapped(body, None, _equation_from_jax, _from_jax))


def _with_bodies(eqn: JaxprEqn, change: Callable[[AnyJaxpr], AnyJaxpr]) -> JaxprEqn:
    """Return an equation with its jaxprs changed; the same object if none changes."""
    new = {}
    for key, value in eqn.params.items():
        if not _holds_jaxpr(value):
            continue
        if type(value) is tuple:
            changed: Any = tuple(change(x) if type(x) in _JAXPRS else x for x in value)
            if any(map(is_not, changed, value)):
                new[key] = changed
        elif (changed := change(value)) is not value:
            new[key] = changed
    return eqn.replace(params={**eqn.params, **new}) if new else eqn


_JAXPRS = frozenset((Jaxpr, ClosedJaxpr))


def jaxpr_as_fun(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Return the function from flat values to flat values that a closed jaxpr computes."""
    return _jaxs_function(for_jax(closed))


# --- marked lowering ------------------------------------------------------------------------------
# Lower marked calls.
#
# Which marks can be used is known only at lowering. XLA cannot partition a unit: it gathers all of
# its operands on each device, and crashes for some. If XLA partitions a program, and in exported
# programs, which a partitioned one may call, a unit becomes a call that is not inlined. Whether a
# backend supports the marks is tested once in a process, on a program of two additions; if it does
# not, calls get the marks that it supports, or none. A call with a convolution gets none either, if
# it cannot be a unit: XLA uses its fast convolutions for the CPU only at a module's top level.
#
# Marked bodies are lowered differently from the same equations elsewhere if XLA would not share the
# code of copies, or would not terminate: see `_draw` and `_body_module`.


def _weakest(*marks: Mark) -> Mark:
    return min(marks, key=MARKS.index)


# --- lowering -------------------------------------------------------------------------------------


def lower_marked_call(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a marked call like a jit, with the strongest mark that is possible here."""
    name: MarkedName = params["name"]
    possible = _strongest(ctx)
    mark = _weakest(name.mark, possible)
    if mark == "call" and convolves(params["jaxpr"]):
        mark = "plain"
    ctx.jaxpr_eqn_ctx = marked(ctx.jaxpr_eqn_ctx, mark, name.body)
    if mark == "plain":
        return pjit._pjit_lowering(ctx, *args, **params)
    draws_in_units = possible == "unit" and _platforms(ctx) == ("cpu",)
    module = _body_module(ctx.module_context, mark, draws_in_units)
    inner = ctx.replace(module_context=module)
    with config.include_full_tracebacks_in_locations(True) if mark == "unit" else nullcontext():
        results = pjit._pjit_lowering(inner, *args, **params)
    if inner.tokens_out is not None:  # for ordered effects
        ctx.set_tokens_out(inner.tokens_out)
    return results


@contextmanager
def _unmarked() -> Iterator[None]:
    """Trace without metadata."""
    previous = config.xla_metadata_context_manager.swap_local(None)
    try:
        yield
    finally:
        config.xla_metadata_context_manager.set_local(previous)


def _body_module(
    module: mlir.ModuleContext, mark: Mark, draws_in_units: bool
) -> mlir.ModuleContext:
    """Return the module context in which marked bodies are lowered.

    It has its own caches: functions that are also called elsewhere are lowered twice. XLA compiles
    units in parallel, and merges the source frames of calls inlined in them into one table,
    without a lock (JAX 0.12): with frames, a compilation may never end. So a unit's equations have
    no source locations.
    """
    key = "marked bodies", mark, draws_in_units
    caches: Any = module.cached_primitive_lowerings.get(key)
    if caches is None:
        caches = {}, {}
        module.cached_primitive_lowerings[key] = caches[1][key] = caches
    module = module.replace(lowering_cache=caches[0], cached_primitive_lowerings=caches[1])
    rules = module.lowering_parameters.override_lowering_rules or ()
    if draws_in_units and _DRAW not in rules:
        parameters = replace(module.lowering_parameters, override_lowering_rules=(*rules, _DRAW))
        module = module.replace(lowering_parameters=parameters)
    if mark == "unit":
        with config.traceback_in_locations_limit(0):
            module = module.replace(traceback_caches=TracebackCaches())
    return module


@mlir.lower_fun
def _draw(*args: jax.Array) -> Sequence[jax.Array]:
    """Draw random bits in a unit of its own, and without a loop.

    For the CPU, JAX lowers a draw to a loop. XLA makes each small loop a function, and compiles it
    for every copy of a body. Without a loop, it is elementwise code, which copies share; but
    draws with keys from other draws must not be fused, which takes minutes for a dozen.
    """
    with set_xla_metadata(**metadata_of("unit", "threefry2x32-draw")):
        return _hash(*args)


@jax.jit
def _hash(*args: jax.Array) -> Sequence[jax.Array]:
    with _unmarked():
        return threefry2x32._threefry2x32_lowering(*args, use_rolled_loops=False)


_DRAW = threefry2x32_p, _draw


def _strongest(ctx: mlir.LoweringRuleContext) -> Mark:
    """Return the strongest mark that a call can have in the program that is being lowered."""
    module = ctx.module_context
    whole: Mark = "unit" if _has_one_device(module) else "call"
    return _weakest(whole, *map(_supported, _platforms(ctx)))


def _platforms(ctx: mlir.LoweringRuleContext) -> tuple[str, ...]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


def _has_one_device(ctx: mlir.ModuleContext) -> bool:
    """Return True if XLA certainly has nothing to partition."""
    axes = ctx.axis_context
    if ctx.lowering_parameters.for_export:
        return False
    if isinstance(axes, mlir.SPMDAxisContext):
        return axes.mesh.size == 1 or axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


# --- backends -------------------------------------------------------------------------------------


@functools.cache
def _supported(platform: str) -> Mark:
    """Return the strongest mark that a platform's backend supports; "unit" without a backend."""
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return "unit"
    taken, reasons = MARKS[-1], []
    while taken != "plain" and (reason := _why_unsupported(taken, device)):
        reasons.append(reason)
        taken = MARKS[MARKS.index(taken) - 1]
    if reasons:
        warnings.warn(
            f"the backend '{platform}' does not support calls marked as '{MARKS[-1]}'; outlined "
            f"calls are marked as '{taken}' instead: {reasons[0]}",
            stacklevel=2,
        )
    return taken


def _why_unsupported(mark: Mark, device: jax.Device) -> str | None:
    """Return why a device does not support calls with this mark, in a line, or None if it does."""

    @jax.jit
    def body(x: jax.Array) -> jax.Array:
        return x + x

    def trial(x: jax.Array) -> jax.Array:
        with set_xla_metadata(**metadata_for_xla(mark, "trial")):
            return body(body(x))

    faults: list[str | None] = []

    def run() -> None:
        try:
            with jax.default_device(device), jax.transfer_guard("allow"):
                x = jax.device_put(np.float32(1), device)
                result = float(jax.jit(trial).lower(x).compile()(x))
            faults.append(None if result == 4 else f"it computes 2 * (1 + 1) as {result}")
        except Exception as error:  # the compiler's error for an unknown attribute
            faults.append((str(error).strip() or type(error).__name__).splitlines()[0])

    # A new thread has none of the settings under which the program is being lowered.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return faults[0]
