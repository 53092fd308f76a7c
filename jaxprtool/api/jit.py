"""`jit`, a drop-in for `jax.jit` that rewrites a function's jaxpr before it is compiled.

It returns `jax.jit` of a function that traces the user's function to a Program, runs the passes,
and evaluates the result under JAX's trace. Static arguments, donation, shardings, caches and
`lower` are therefore JAX's own, and a call that is already compiled takes JAX's usual path.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, PipelineError, UnsupportedError
from jaxprtool.ir.arguments import (
    Changed,
    StateChange,
    call_tracked,
    has_objects,
    result_paths,
    shared_variables,
    sharing,
    uses_objects,
    variable_leaves,
)
from jaxprtool.ir.backends import process_cache
from jaxprtool.ir.equations import named, type_of
from jaxprtool.ir.program import Program, Programs, with_lifted
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import paths, release, unique
from jaxprtool.jaxcompat import ClosedJaxpr, Var
from jaxprtool.jaxcompat.mapping import evaluated
from jaxprtool.loading.trace import function_name, held, is_filtered, positional_names, released
from jaxprtool.passes import Observer, Pass, Pipeline, Step

if TYPE_CHECKING:
    from jaxprtool.sizes.buckets import Buckets

jaxcompat.hide_from_tracebacks(__file__)

_NOT_GIVEN: Any = object()

Passes = str | Pipeline | Pass | Callable[[Program], Program | Programs]


def jit(
    fun: Callable = _NOT_GIVEN,
    /,
    *,
    passes: Passes = "-O1",
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    types: str | Mapping[str, Any] | Sequence[Any] | None = None,
    **jit_options: Any,
) -> Callable:
    """Return `jax.jit` of `fun`, whose jaxpr the passes rewrite before it is compiled.

    A function already under `jax.jit` keeps its options except for those given here. A pipeline may
    change the results of the function (`grad`), but not its arguments. Exceptions of `fun` are
    raised unchanged.

    Args:
        fun: The function. Without it, a decorator is returned.
        passes: A pipeline as text, a Pipeline, a pass, or a function from a Program to a Program.
            It runs once for each signature of `fun`. Repeated calls of `jit` with the same function
            and pipeline share the result.
        shapes: Buckets of sizes, by symbol: `{'n': (64, 128, 256)}`. If the type of a parameter has
            the symbol, arguments are padded to the smallest bucket that fits, results are cut, and
            the masked function is compiled once per bucket.
        types: The types of parameters; other parameters accept any type. A text as for `--args`,
            `"tokens=i32[n]"`, types by parameter, or a sequence. By default, parameter annotations
            that are such texts, or the function's example arguments.
        **jit_options: The options of `jax.jit`.

    Returns:
        The jitted function as from `jax.jit`; with `shapes`, a function with the method `lower`.

    Raises:
        ArgumentsError: For invalid `shapes` and `types`; in calls, for arguments that do not have
            their types or exceed the largest bucket.
        PipelineError: Immediately for text that is not a pipeline. When the function is traced, for
            passes that return several programs or change its arguments.
        TypeError: If `fun` is not a valid function for `jax.jit`.
        FreedRefError: For a use of a ref after it was freed.
    """
    if fun is _NOT_GIVEN:
        return functools.partial(jit, passes=passes, shapes=shapes, types=types, **jit_options)
    if shapes is None and types is not None:
        raise ArgumentsError("jit: types is only used with shapes, which is missing")
    transform = _Transform.of(passes)
    jaxcompat.check_callable(fun)
    original = fun
    if jaxcompat.is_jitted(fun):
        fun, jit_options = _under_jit(fun, jit_options)
    buckets = None
    if shapes is not None:
        from jaxprtool.sizes.buckets import Buckets  # rarely needed, and slow to import

        if jit_options.get("in_shardings") is not None:
            raise ArgumentsError(
                "jit: in_shardings cannot be combined with shapes, because JAX then does not "
                "accept the sizes, which are passed by name",
                "place arguments with jax.device_put instead",
            )
        buckets = Buckets.read(fun, shapes, types)
    if is_filtered(fun):
        inner = released(fun)
        static = jaxcompat.static_arguments(
            inner, jit_options.get("static_argnums"), jit_options.get("static_argnames")
        )
        rewritten = _rewritten(lambda: inner, transform, static, buckets)
        filtered = _Filtered(fun, jax.jit(rewritten, **jit_options))
        return filtered if buckets is None else buckets.around(fun, filtered)
    if buckets is None and fun is original and uses_objects(fun):
        return _Stateful(fun, transform, jit_options)
    rewritten = _shared(fun, transform, jit_options, buckets)
    jitted = jax.jit(rewritten, **jit_options)
    jitted.__wrapped__ = original
    # `rewritten` must not keep the function alive. `functools.wraps` replaces `__wrapped__` and
    # copies all other attributes, so each has a different name.
    setattr(jitted, f"_jaxprtool_fun_{next(_numbers)}", fun)
    return jitted if buckets is None else buckets.around(original, jitted)


_numbers = itertools.count()


@dataclass(frozen=True)
class _SharedReplacement:
    """The replacement that `jax.jit` traces for a function, which it does not keep alive."""

    fun: weakref.ref[Callable]
    rewritten: Callable


#: By function, then by passes, static arguments and buckets. JAX caches traces and executables by
#: function: all wrappers of a function share one replacement.
_shared_functions: WeakKeyDictionary[Callable, dict[Hashable, _SharedReplacement]] = process_cache(
    WeakKeyDictionary()
)


def _shared(
    fun: Callable, transform: _Transform, options: Mapping[str, Any], buckets: Buckets | None
) -> Callable:
    """Return the function that `jax.jit` traces in place of `fun`, the same one if possible."""
    # JAX aborts the process for a function that is not hashable or weakly referenceable.
    hash(fun)
    weak = weakref.ref(fun)
    static = jaxcompat.static_arguments(
        fun, options.get("static_argnums"), options.get("static_argnames")
    )
    if transform.key is None:
        return _rewritten(weak, transform, static, buckets)
    key = transform.key, static, buckets and buckets.key
    entries = _shared_functions.setdefault(fun, {})
    try:
        entry = entries.get(key)
    except TypeError:  # an option of a pass or a given type is not hashable
        return _rewritten(weak, transform, static, buckets)
    if entry is None or entry.fun() is not fun:
        entry = entries[key] = _SharedReplacement(
            weak, _rewritten(weak, transform, static, buckets)
        )
    return entry.rewritten


def _under_jit(jitted: Callable, options: Mapping[str, object]) -> tuple[Callable, dict[str, Any]]:
    """Return the function under `jax.jit`, and its options updated by these.

    Positions and names are two forms of the same option, so either one replaces both.
    """
    fun, keywords = jaxcompat.jit_arguments(jitted)
    for prefix in ("static_arg", "donate_arg"):
        if any(name.startswith(prefix) for name in options):
            keywords = {
                name: value for name, value in keywords.items() if not name.startswith(prefix)
            }
    return fun, {**keywords, **options}


class _Filtered:
    """The result of `jit` for a function jitted by Equinox, called with leaves that are not arrays.

    For JAX these leaves are part of the structure of the arguments, and of the cache key.
    """

    def __init__(self, fun: Callable, jitted: Any):
        self._fun, self._jitted = fun, jitted
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: object, **kwargs: object) -> object:
        args, kwargs = held(self._fun, (args, kwargs))
        return release(self._jitted(*args, **kwargs))

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Return the result of `jax.jit(...).lower`."""
        args, kwargs = held(self._fun, (args, kwargs))
        return self._jitted.lower(*args, **kwargs)

    def __get__(self, instance: object, owner: object = None) -> Callable:
        return self if instance is None else functools.partial(self, instance)


class _Stateful:
    """The result of `jit` for a function that may change Flax NNX objects in its arguments.

    They change as under `nnx.jit`. For JAX, their new state is a result.
    """

    def __init__(self, fun: Any, transform: _Transform, options: Mapping[str, Any]):
        self._fun, self._transform = fun, transform
        jitted = getattr(fun, "jitted_fn", None)  # set by nnx.jit
        if jaxcompat.is_jitted(jitted) and not any(
            name.startswith("static_arg") for name in options
        ):
            numbers, names = jaxcompat.jit_static_arguments(jitted)
            options = {**options, "static_argnums": numbers, "static_argnames": names}
        self._options = options
        self._static = jaxcompat.static_arguments(
            fun, options.get("static_argnums"), options.get("static_argnames")
        )
        self._jitted: dict[tuple[int, ...], Any] = {}
        #: What `Changed.value_updates` returns, by the identity of the change.
        self._updates: dict[int, tuple[StateChange, list[tuple[int, str]] | None]] = {}
        functools.update_wrapper(self, fun, updated=())

    def _for(self, leaves: Sequence[Any]) -> Any:
        """Return the jitted function for arguments that share Variables in this way."""
        shared = shared_variables(leaves)
        if shared not in self._jitted:
            rewritten = _rewritten(lambda: self._fun, self._transform, self._static, None, shared)
            self._jitted[shared] = jax.jit(rewritten, **self._options)
        return self._jitted[shared]

    def _dynamic(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
        numbers, names = self._static
        if not numbers and not names:
            return args, kwargs
        static = {number % len(args) for number in numbers if number < len(args)}
        return (
            [arg for i, arg in enumerate(args) if i not in static],
            {name: arg for name, arg in kwargs.items() if name not in names},
        )

    def __call__(self, *args: object, **kwargs: object) -> object:
        dynamic = self._dynamic(args, kwargs)
        leaves = variable_leaves(dynamic)
        out = self._for(leaves)(*args, **kwargs)
        if not isinstance(out, Changed):
            return out
        change, updates = self._updates.get(id(out.change), (None, None))
        if change is None:
            result = out.applied(*dynamic)
            if result is not out:
                self._updates[id(out.change)] = out.change, out.value_updates(leaves, *dynamic)
            return result
        if updates is None:
            return out.applied(*dynamic)
        for i, path in updates:
            leaves[i].set_raw_value(out.state[path])
        return out.result

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Return the result of `jax.jit(...).lower`; the new state of objects is a result."""
        return self._for(variable_leaves(self._dynamic(args, kwargs))).lower(*args, **kwargs)

    def trace(self, *args: object, **kwargs: object) -> jax.stages.Traced:
        """Return the result of `jax.jit(...).trace`; the new state of objects is a result."""
        return self._for(variable_leaves(self._dynamic(args, kwargs))).trace(*args, **kwargs)

    def __get__(self, instance: object, owner: object = None) -> Callable:
        return self if instance is None else functools.partial(self, instance)


def _rewritten(
    weak: Callable[[], Any],
    transform: _Transform,
    static: tuple[Any, Any],
    buckets: Buckets | None,
    shared: Sequence[int] | None = None,
) -> Callable:
    """Return the function that `jax.jit` traces in place of the one that `weak()` returns.

    With `shared`, the lists of identical Flax NNX Variables, changed objects are results.
    """
    original = weak()

    def rewritten(*args: object, **kwargs: object) -> object:
        fun = weak()
        if jax.config.jax_disable_jit:
            return fun(*args, **kwargs)
        call = None if buckets is None else buckets.call(args, kwargs)
        types = None if call is None else (call.args, call.kwargs)
        program, operands = _traced(fun, args, kwargs, static, transform.bound_axes, types, shared)
        check_freed_refs(program.jaxpr)
        with jaxcompat.at_once():
            result = transform(program)
        _check_arguments(program, result, transform)
        if call is not None:
            return call.results(result, operands)
        outs = evaluated(result.jaxpr, operands)
        return jax.tree.unflatten(result.out_tree, outs)

    functools.update_wrapper(rewritten, original)
    if isinstance(weak, weakref.ref):
        vars(rewritten)["__wrapped__"] = weakref.proxy(original)
    if not hasattr(original, "__name__"):
        rewritten.__name__ = function_name(original)
    return rewritten


# --- tracing --------------------------------------------------------------------------------------


def _traced(
    fun: Callable,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    static: tuple[Sequence[int], frozenset[str]],
    bound_axes: Sequence[tuple[Hashable, int]],
    types: tuple[tuple[object, ...], dict[str, object]] | None,
    shared: Sequence[int] | None = None,
) -> tuple[Program, list[object]]:
    """Return the program of a call, and the operands to evaluate it on.

    `types` are the arguments to trace with if some types differ. Outer tracers that `fun` closes
    over are arguments of the program; a view of a ref is a list of the ref and of its traced
    indices. Without `shared`, a warning reports objects that `fun` changes.
    """
    numbers, count = static[0], len(args)
    positions = frozenset(n % count for n in numbers if -count <= n < count)
    static_kwargs = {k: v for k, v in kwargs.items() if k in static[1]}

    def opened(args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        named = {k: v for k, v in kwargs.items() if k not in static_kwargs}
        return jaxcompat.open_views((dynamic, named))

    arguments, structure = opened(args, kwargs)
    leaves, in_tree = jax.tree.flatten(arguments)
    traced_on = leaves if types is None else jax.tree.leaves(opened(*types)[0])
    result: dict[str, Any] = {}

    def flat(*leaves: object) -> list[object]:
        traced, traced_kwargs = sharing(structure.unflatten(leaves), shared or ())
        rest = iter(traced)
        full = [a if i in positions else next(rest) for i, a in enumerate(args)]
        if has_objects((traced, traced_kwargs)):
            bound = functools.partial(fun, **static_kwargs)
            flags = [i in positions for i in range(count)]
            out = call_tracked(bound, full, traced_kwargs, positional_names(fun, count), flags)
            if shared is None and isinstance(out, Changed):
                out = _without_state(fun, out, types is not None)
        else:
            out = fun(*full, **traced_kwargs, **static_kwargs)
        result["names"] = result_paths(out)
        outs, result["tree"] = jax.tree.flatten(out)
        return outs

    debug = jax.api_util.debug_info(
        "jit",
        fun,
        args,
        kwargs,
        static_argnums=tuple(positions),
        static_argnames=tuple(static_kwargs),
    )._replace(result_paths=lambda: result["names"])
    with jaxcompat.axes_bound(bound_axes):
        closed, lifted = jaxcompat.trace_lifted(flat, debug, traced_on)
    names = debug.arg_names
    if names is None or len(names) != len(leaves):
        names = paths("argument", leaves)
    program = Program(
        name=function_name(fun),
        jaxpr=closed,
        in_tree=in_tree,
        out_tree=result["tree"],
        arg_names=unique(names),
        out_names=result["names"],
        axis_env=tuple(bound_axes),
    )
    return _with_lifted_last(program, len(lifted)), [*leaves, *lifted]


def _without_state(fun: Callable, out: Changed, padded: bool) -> object:
    """Return only the result of a function that changes objects, which `jax.jit` does not support.

    Raises ArgumentsError if the arguments are `padded`, since then no kind of jit changes them.
    """
    name, first = function_name(fun), min(out.state, default="its arguments")
    if padded:
        raise ArgumentsError(
            f"jit: {name} changes {first} in place, and with shapes its new state would be lost",
            "also return nnx.state(model), of a model that the function creates with nnx.merge "
            "or nnx.clone",
        )
    warnings.warn(
        f"{name} changes {first} in place, but under jit the object is not changed; use "
        f"jaxprtool.jit(nnx.jit({name}))",
        stacklevel=2,
    )
    return out.result


def _with_lifted_last(program: Program, count: int) -> Program:
    """Return the program with lifted values, its jaxpr's first invars, as its last argument."""
    if not count:
        return program
    jaxpr = program.jaxpr
    invars = [*jaxpr.invars[count:], *jaxpr.invars[:count]]
    return with_lifted(program, jaxcompat.replace_jaxpr(jaxpr, invars=invars), count)


# --- passes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Transform:
    """The passes in any form; called with a program, returns the rewritten one.

    Passes with the same `key` are equivalent. A function has no key, since it may close over the
    function to rewrite.
    """

    run: Callable[[Program], object]
    text: str
    bound_axes: tuple[tuple[Hashable, int], ...] = ()
    key: Hashable = None

    @classmethod
    def of(cls, passes: Passes) -> _Transform:
        if isinstance(passes, str):
            passes = Pipeline.parse(passes)
        elif isinstance(passes, Pass):
            passes = Pipeline((Step(passes),))
        if isinstance(passes, Pipeline):
            return cls(
                functools.partial(_run, passes),
                str(passes),
                passes.bound_axes,
                (str(passes), passes),
            )
        if not callable(passes):
            raise PipelineError(
                f"passes must be a pipeline, a pass or a function of a Program, not {passes!r}"
            )
        return cls(passes, function_name(passes))

    def __call__(self, program: Program) -> Program:
        result = self.run(program)
        if isinstance(result, Programs):
            raise PipelineError(
                f"the passes '{self.text}' return several programs for {program.name}: "
                f"{', '.join(result)}; jit compiles one"
            )
        if not isinstance(result, Program):
            raise PipelineError(
                f"the passes '{self.text}' returned {type(result).__name__}, not a Program"
            )
        return result


class _Current(Observer):
    """The pass that is running."""

    step: Step | None = None

    def before(self, step: Step, program: Program) -> None:
        self.step = step


def _run(pipeline: Pipeline, program: Program) -> Program | Programs:
    """Run a pipeline. An error has a note that names the pass that raised it."""
    current = _Current()
    try:
        return pipeline.run(program, current, check=False)
    except JaxprToolError as error:
        error.add_note(f"Raised by pass '{current.step}' of jaxprtool.jit on {program.name}.")
        raise


def _check_arguments(program: Program, result: Program, transform: _Transform) -> None:
    """Raise PipelineError if a result has other arguments than the function."""
    old, new = ([type_of(aval) for aval in p.in_avals] for p in (program, result))
    if program.in_tree == result.in_tree and old == new:
        return
    raise PipelineError(
        f"the passes '{transform.text}' change the arguments of {program.name}: "
        f"({', '.join(old)}) before, ({', '.join(new)}) after",
        "trace the function and apply the passes to the Program, or apply jax.jit to the result",
    )


# --- freed refs -----------------------------------------------------------------------------------
# Refs that `jax.freeze` or `jax.free_ref` has ended, and that cannot be read any more.


class FreedRefError(UnsupportedError, ValueError):
    """A ref is read, or freed again, after it was freed."""


def check_freed_refs(closed: ClosedJaxpr) -> None:
    """Check that no equation reads, writes or frees a ref that an earlier equation has freed.

    JAX checks this when it lowers a program, after dead code elimination. By then a pass may have
    replaced the read by the ref's value, and the error would go unnoticed.

    Raises:
        FreedRefError: If there is such an equation; the message names the first.
    """
    if not any(traits(eqn).ends_ref for eqn in closed.eqns):
        return
    left, *_ = jaxcompat.jax_dce_jaxpr(jaxcompat.open_jaxpr(closed), [True] * len(closed.outvars))
    freed: set[Var] = set()
    for eqn in left.eqns:
        ended = set(eqn.invars[:1]) if traits(eqn).ends_ref else set()
        used = ended | {jaxcompat.ref_of(effect) for effect in eqn.effects}
        if not used.isdisjoint(freed):
            raise FreedRefError(f"the {named(eqn)} uses a ref that has been freed")
        freed |= ended
