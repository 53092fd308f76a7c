"""Observe what JAX lowers and compiles: every program of `jit`, and every operation outside of it.

`observed` replaces a few functions of JAX that run when `jit` has no executable for a call, and
puts them back. Calls that have one do not come here: JAX dispatches them in C++.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, update_wrapper, wraps
from typing import Any, Protocol

import jax
from jax import monitoring
from jax._src import config, core, pjit, traceback_util
from jax._src.interpreters import pxla
from jax._src.lib import xla_client

from jaxprtool.jaxcompat import tracing
from jaxprtool.jaxcompat.jaxprs import AnyJaxpr, open_jaxpr


@dataclass(frozen=True)
class JitCall:
    """A call of a function under `jax.jit` for which JAX looks up, or makes, a jaxpr.

    Attributes:
        fun: The function that was given to `jax.jit`.
        jit: An object that identifies the result of `jax.jit`.
        statics: The static arguments by name.
        flat: The flat arguments: values or types.
        avals: Their types.
        options: The options of `jax.jit` for the flat arguments and results.
        in_tree: The structure of the dynamic arguments, `(args, kwargs)`.
        out_tree: The structure of the results.
        arg_names: The paths of the flat arguments.
        start: When tracing began, by `time.time`.
        trace_seconds: The time of tracing; 0 if JAX had the jaxpr.
        trace_cpu: The CPU time of tracing.
    """

    fun: Any
    jit: Any
    statics: dict[str, Any]
    flat: Sequence[Any]
    avals: Sequence[Any]
    options: tracing.TracedOptions
    in_tree: Any
    out_tree: Any
    arg_names: tuple[str, ...]
    start: float
    trace_seconds: float
    trace_cpu: float


@dataclass(frozen=True)
class TransformedCall:
    """A call of a function under `jax.jit` whose arguments are traced outside of `jit`.

    Attributes:
        fun: The function that was given to `jax.jit`.
        statics: The static arguments by name.
        source: The name and place of its function in JAX's debug information, which the jaxprs that
            JAX makes of it have too.
        start: When tracing began, by `time.time`.
        trace_seconds: The time of tracing; 0 if JAX had the jaxpr.
        trace_cpu: The CPU time of tracing.
    """

    fun: Any
    statics: dict[str, Any]
    source: str
    start: float
    trace_seconds: float
    trace_cpu: float


@dataclass(eq=False)
class Lowering:
    """A jaxpr that JAX lowers.

    Attributes:
        name: The name of its function.
        jaxpr: The closed jaxpr, before JAX removes unused arguments.
        in_shardings: The sharding of each argument, or JAX's mark for unspecified ones.
        donated: Whether each argument is donated.
        options: The compiler options of `jax.jit`, as pairs.
        call: The call that it is lowered for, with its arguments; None if it is not a call of
            `jit`'s own, as under `jax.grad`.
        origin: The call of `jit` that JAX transforms, if the jaxpr is made of it by `jax.vmap` or
            `jax.grad` outside of `jit`, while the call runs; else None.
        described: The observer's description of the call, if it was given before the lowering.
        start: When lowering began, by `time.time`.
        seconds: The time of lowering.
        cpu: Its CPU time.
        error: The exception that lowering raised, or None.
        begun: What the observer returned when it began.
    """

    name: str
    jaxpr: AnyJaxpr
    in_shardings: tuple[Any, ...]
    donated: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    call: JitCall | None
    origin: TransformedCall | None
    described: Any
    start: float
    seconds: float = 0.0
    cpu: float = 0.0
    error: BaseException | None = None
    begun: Any = None


@dataclass(frozen=True)
class CompileTimes:
    """One compilation by XLA.

    Attributes:
        seconds: Its time.
        cpu: Its CPU time, in all threads.
        cached: Whether the executable came from the persistent compilation cache.
        error: The exception that it raised, or None.
    """

    seconds: float
    cpu: float
    cached: bool
    error: BaseException | None = None


class CompileObserver(Protocol):
    """The callbacks of `observed`. An exception in one goes to `failed`, not to the user."""

    def jit_made(self, fun: Any, jit: Any, result: Any) -> Around | None:
        """`jax.jit` was applied to `fun`; `jit` identifies the result in a `JitCall`.

        If a function is returned, calls of the jitted function go through it.
        """

    def describe(self, call: JitCall) -> Any:
        """Describe a call whose arguments are freed before it is lowered: `jit(f).trace(...)`."""

    def begins(self, phase: str, name: str) -> Any:
        """A function begins to be traced or lowered: phase "tracing" or "lowering".

        The result is given to `traced`, or is `begun` of the lowering.
        """

    def traced(self, begun: Any) -> None:
        """Tracing has ended, or raised."""

    def lowered(self, lowering: Lowering) -> Any:
        """A program was lowered. The result is given to `compiling` and `compiled`."""

    def compiling(self, lowered: Any) -> None:
        """XLA begins to compile it."""

    def compiled(self, lowered: Any, times: CompileTimes) -> None:
        """XLA has compiled it."""

    def cleared(self, fun: Any) -> None:
        """The caches of a function were cleared, or those of all functions if `fun` is None."""

    def waited(self, array: jax.Array, value: Any, seconds: float) -> None:
        """Python has read the values of an array, or one of them."""

    def failed(self, error: Exception) -> None:
        """The observer itself raised an exception."""


@contextlib.contextmanager
def observed(observer: CompileObserver) -> Iterator[None]:
    """Notify `observer` of all that JAX compiles in a `with` block."""
    hooks = _Hooks(observer)
    _hide_frames()
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in hooks.replacements():
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, replacement)
        monitoring.register_event_listener(hooks.event)
        stack.callback(monitoring.unregister_event_listener, hooks.event)
        yield


@cache
def _hide_frames() -> None:
    """Have JAX leave the frames of the replacements out of the user's tracebacks."""
    traceback_util.register_exclusion(__file__)


def is_operation(fun: Any) -> bool:
    """Return True for the function of one primitive that JAX compiles outside of `jit`."""
    return getattr(fun, "_apply_primitive", False)


#: Settings that change what is traced or compiled, and have a public name.
_SETTINGS = (
    "enable_x64",
    "default_matmul_precision",
    "default_device",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "threefry_partitionable",
    "random_seed_offset",
    "softmax_custom_jvp",
    "debug_key_reuse",
    "debug_nans",
    "disable_jit",
)


def trace_settings() -> dict[str, Any]:
    """Return the settings that JAX's caches of traces depend on, at the moment, by name.

    Those without a public name are one tuple, `others`.
    """
    settings = {name: getattr(jax.config, f"jax_{name}", None) for name in _SETTINGS}
    mesh = jax.sharding.get_abstract_mesh()
    others = config.trace_context()[:-1]  # the last one has the named axes of a trace around
    return settings | {"mesh": None if mesh.empty else mesh, "others": others}


class _Leaves(list[Any]):
    """The flat arguments of a call, which JAX keeps as long as the call lasts, and the call."""

    call: JitCall | None = None
    origin: TransformedCall | None = None


class _ThreadState(threading.local):
    """What happens in a thread at the moment."""

    leaves: weakref.ref[_Leaves] | None = None
    is_tracing: bool = False
    hits: int = 0
    waits: int = 0


#: Whether this thread compiles something of the observer's own.
_quiet = threading.local()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide what a `with` block compiles from observers."""
    previous = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = previous


@dataclass
class _Hooks:
    """The replacements of JAX's functions. JAX's own are called with the same arguments."""

    observer: CompileObserver
    state: _ThreadState = field(default_factory=_ThreadState)
    described: weakref.WeakKeyDictionary[Any, Any] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    traced: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    evict: Any = None

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield each function that is replaced: its owner, its name, and the replacement."""
        yield pjit, "make_jit", self._make_jit(pjit.make_jit)
        yield pjit, "_infer_params", self._infer_params(pjit._infer_params)
        yield pxla, "lower_sharding_computation", self._lower(pxla.lower_sharding_computation)
        array = xla_client.ArrayImpl
        yield array, "_value", self._value(vars(array)["_value"])
        yield array, "item", self._item(vars(array)["item"])
        yield jax, "clear_caches", self._clear(jax.clear_caches)
        self.evict = self._evict(vars(tracing.JITTED)["clear_cache"])
        yield tracing.JITTED, "clear_cache", self.evict

    def tell(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the observer; the user's program never sees its exceptions."""
        if getattr(_quiet, "on", False):
            return None
        try:
            return method(*args)
        except Exception as error:
            self.observer.failed(error)
            return None

    def event(self, name: str, **_: str | int) -> None:
        if name == "/jax/compilation_cache/cache_hits":
            self.state.hits += 1

    # --- jit -----------------------------------------------------------------------------------

    def _make_jit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def make_jit(fun: Any, **options: Any) -> Any:
            function = original(fun, **options)
            tracing.JITTED.clear_cache = self.evict  # JAX has set its own again
            around = self.tell(self.observer.jit_made, fun, function._jit_info, function)
            return function if around is None else ObservedJit(function, around)

        return make_jit

    def _infer_params(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
            is_transformed = not core.trace_ctx.is_top_level()
            around = self.state.is_tracing
            if is_transformed and around:
                return original(fun, info, args, kwargs)  # a part of another function's program
            begun = None
            if not (is_transformed or is_operation(fun)):
                name = getattr(fun, "__name__", type(fun).__name__)
                begun = self.tell(self.observer.begins, "tracing", name)
            start, cpu, clock = time.time(), time.process_time(), time.perf_counter()
            self.state.is_tracing = True
            try:
                params, flat = original(fun, info, args, kwargs)
            finally:
                self.state.is_tracing = around
                if begun is not None:
                    self.tell(self.observer.traced, begun)
            seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
            jaxpr = params.params["jaxpr"]
            is_new = jaxpr not in self.traced
            self.traced.add(jaxpr)
            times = (seconds, cpu) if is_new else (0.0, 0.0)
            statics = tracing.static_values(info, args, kwargs)
            if is_transformed:
                leaves, source = _Leaves(flat), open_jaxpr(jaxpr).debug_info.func_src_info
                leaves.origin = TransformedCall(fun, statics, source, start, *times)
                self.state.leaves = weakref.ref(leaves)
                return params, leaves
            call = JitCall(
                fun,
                info,
                statics,
                flat[len(params.consts) :],
                params.in_avals,
                tracing.options_of(params.params, len(params.consts)),
                params.in_tree,
                params.out_tree,
                tuple(params.arg_names),
                start,
                *times,
            )
            if sys._getframe(1).f_code.co_name != "cache_miss":  # `jit(f).trace(...)`
                about = self.tell(self.observer.describe, call)
                self.described[jaxpr] = replace(call, statics={}, flat=()), about
                return params, flat
            leaves = _Leaves(flat)
            leaves.call = call
            self.state.leaves = weakref.ref(leaves)
            return params, leaves

        return infer_params

    # --- lowering and compiling ----------------------------------------------------------------

    def _lower(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def lower_sharding_computation(
            jaxpr: Any,
            api_name: str,
            name: str,
            in_shardings: Any,
            out_shardings: Any,
            in_layouts: Any,
            out_layouts: Any,
            donated: Any,
            **options: Any,
        ) -> Any:
            leaves = None if self.state.leaves is None else self.state.leaves()
            call, about, origin = (None if leaves is None else leaves.call), None, None
            if leaves is not None and _is_made_of(jaxpr, leaves.origin):
                origin, leaves.origin = leaves.origin, None
            if call is None and jaxpr in self.described:
                call, about = self.described[jaxpr]
            if call is not None and len(call.arg_names) != len(jaxpr.in_avals):
                call = None  # another function is lowered for the call
            lowering = Lowering(
                name,
                jaxpr,
                tuple(in_shardings),
                tuple(donated),
                tuple(options["compiler_options_kvs"]),
                call,
                origin,
                about,
                time.time(),
            )
            lowering.begun = self.tell(self.observer.begins, "lowering", name)
            cpu, clock = time.process_time(), time.perf_counter()
            try:
                computation = original(
                    jaxpr,
                    api_name,
                    name,
                    in_shardings,
                    out_shardings,
                    in_layouts,
                    out_layouts,
                    donated,
                    **options,
                )
            except BaseException as error:
                lowering.error = error
                raise
            finally:
                lowering.seconds = time.perf_counter() - clock
                lowering.cpu = time.process_time() - cpu
                record = self.tell(self.observer.lowered, lowering)
            if record is not None:
                computation.compile = self._compile(computation, record)
            return computation

        return lower_sharding_computation

    def _compile(self, computation: Any, record: Any) -> Callable[..., Any]:
        original = computation.compile

        @wraps(original)
        def compile_computation(*args: Any, **kwargs: Any) -> Any:
            if computation._executable is not None:
                return original(*args, **kwargs)
            hits, error = self.state.hits, None
            self.tell(self.observer.compiling, record)
            cpu, clock = time.process_time(), time.perf_counter()
            try:
                return original(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
                times = CompileTimes(seconds, cpu, self.state.hits > hits, error)
                self.tell(self.observer.compiled, record, times)

        return compile_computation

    # --- caches and values ---------------------------------------------------------------------

    def _clear(self, original: Callable[[], None]) -> Callable[[], None]:
        @wraps(original)
        def clear_caches() -> None:
            original()
            self.tell(self.observer.cleared, None)

        return clear_caches

    def _evict(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(original)
        def jit_evict_fn(jitted: Any) -> None:
            original(jitted)
            self.tell(self.observer.cleared, jitted._fun)

        return jit_evict_fn

    def _value(self, original: Any) -> Any:
        read = original.fget

        def value(array: Any) -> Any:
            if array._npy_value is not None:
                return read(array)
            clock = time.perf_counter()
            result = read(array)
            self._waited(array, result, clock)
            return result

        return property(value)

    def _item(self, original: Any) -> Any:
        """Return a replacement of `item`, which may read an element without `_value`."""

        @wraps(original)
        def item(array: Any, *args: int) -> Any:
            waits, clock = self.state.waits, time.perf_counter()
            result = original(array, *args)
            if self.state.waits == waits:
                self._waited(array, result, clock)
            return result

        return item

    def _waited(self, array: Any, value: Any, clock: float) -> None:
        self.state.waits += 1
        self.tell(self.observer.waited, array, value, time.perf_counter() - clock)


def _is_made_of(jaxpr: Any, call: TransformedCall | None) -> bool:
    """Return True if a jaxpr has the function of a call, by JAX's debug information."""
    return call is not None and call.source == open_jaxpr(jaxpr).debug_info.func_src_info


# --- observed jit ---------------------------------------------------------------------------------
# A result of `jax.jit` whose calls are observed. It is used like JAX's own.

#: Calls a jitted function with arguments, and observes the call.
Around = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class ObservedJit:
    """A jitted function whose calls go through another function, unless JAX is tracing.

    Its attributes are those of the jitted function, and `isinstance` takes it for one.
    """

    def __init__(self, jitted: Any, around: Around) -> None:
        self._jitted, self._around = jitted, around
        update_wrapper(self, jitted, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not core.trace_ctx.is_top_level():
            return self._jitted(*args, **kwargs)
        return self._around(self._jitted, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __repr__(self) -> str:
        return repr(self._jitted)

    def __reduce__(self) -> Any:
        return self._jitted.__reduce__()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._jitted)
