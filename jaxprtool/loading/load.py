"""Loading of a function with its arguments, ready to be traced, from a TARGET and `--args`.

Arguments come from `--args`, else from the factory that a TARGET is or calls, else from the
function's own example arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Unpack

import jax

from jaxprtool.errors import ArgumentsError, TargetError, UserFunctionError, described
from jaxprtool.ir.basics.quantities import in_bytes
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.specs import NO_SPECS, Specs
from jaxprtool.ir.shapes.symbols import symbolic_sizes
from jaxprtool.ir.source.frames import Root
from jaxprtool.loading import argspec
from jaxprtool.loading.example import Example
from jaxprtool.loading.hints import class_hint, module_hint, require_arrays, target_hint
from jaxprtool.loading.missing_arguments import (
    require_no_arguments,
    required,
    suggestion,
)
from jaxprtool.loading.parameter_types import ParameterTypes
from jaxprtool.loading.target import Target, resolve
from jaxprtool.loading.trace import (
    BoundCall,
    StaticArguments,
    bind_arguments,
    function_name,
    positional_names,
    shown_signature,
    signature,
    trace_call,
    unwrapped,
)
from jaxprtool.loading.typed_call import Arguments, typed_call

_FACTORY_GIVES = (
    "a factory must return function, (function, args) or (function, args, kwargs), with args a "
    "tuple"
)

#: Seconds after which the duration of a factory call is mentioned.
LONG = 2.0

#: The minimum size of the values for a note on a slow factory, in bytes.
LARGE = 16 * 2**20


@dataclass(frozen=True)
class Entry:
    """A function and the arguments to trace it with.

    Attributes:
        name: The name of the function.
        fun: The function.
        args: The positional arguments.
        kwargs: The keyword arguments.
        static: The static arguments, as in options of `jax.jit`.
        target: The TARGET that named the function.
        hint: A hint about the likely mistake if the function cannot be traced.
        factory_seconds: The time of the factory call, in seconds.
        after: The arguments of `--args` if they are for the program after the passes.
        roots: The folders of the user's files.
        specs: The shardings of arguments and results.
    """

    name: str
    fun: Callable
    args: tuple[object, ...]
    kwargs: dict[str, object]
    static: StaticArguments
    target: str
    hint: str | None
    factory_seconds: float = 0.0
    after: Arguments | None = None
    roots: tuple[Root, ...] = ()
    specs: Specs = NO_SPECS

    def trace(self, axes: Sequence[tuple[Hashable, int]] = ()) -> Program:
        """Return the Program, with the named axes of `axes` free in it.

        Raises ArgumentsError or UserFunctionError, as `trace` does, and TargetError for a function
        that returns a function.
        """
        self.specs.check_mesh()
        try:
            program = trace_call(self.name, self.fun, self._call(), axes)
        except UserFunctionError as error:
            hints = error.hint, self.hint, module_hint(error.message)
            if isinstance(self.fun, type):  # the error of the class's library is more helpful
                hints = hints[0], hints[2], hints[1]
            error.hint = next(filter(None, hints), None)
            error.roots = self.roots
            raise
        require_arrays(program, self.target, self.hint)
        return self.specs.applied(program.replace(roots=self.roots))

    def arguments(self) -> list[object]:
        """Return the flat arguments in the Program's order: arrays, scalars or types."""
        return self._call().leaves

    @property
    def needless_work(self) -> str | None:
        """The slow computation of argument values of which only the types are needed, if any."""
        size = sum(leaf.nbytes for leaf in self.arguments() if isinstance(leaf, jax.Array))
        if self.factory_seconds < LONG or size < LARGE:
            return None
        return (
            f"the factory took {self.factory_seconds:.0f} s and created {in_bytes(size)} of "
            "values, but only their types are needed; use jax.eval_shape(init, ...) in the "
            "factory"
        )

    def run(self) -> object:
        """Call the function with its arguments, which must be values, and return its results.

        Raises UserFunctionError if it raises.
        """
        args = map(unwrapped, self.args)
        kwargs = {name: unwrapped(value) for name, value in self.kwargs.items()}
        try:
            return self.fun(*args, **kwargs)
        except (Exception, SystemExit) as error:
            failure = UserFunctionError(f"{self.name} raised {described(error)}", self.hint)
            failure.roots = self.roots
            raise failure from error

    def require_values(self) -> None:
        """Raise ArgumentsError for an argument that is given by its type."""
        for leaf in jax.tree.leaves((self.args, self.kwargs)):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ArgumentsError(
                    f"{self.name} is called, so its arguments must be values",
                    "write a value, such as ones(f32[8,3]), or create it in a factory",
                )

    def position(self, number: int) -> int:
        """Return the Program's index of the function's positional argument; see `Call.position`."""
        return self._call().position(number)

    def _call(self) -> BoundCall:
        try:
            return bind_arguments(self.fun, self.args, self.kwargs, **self.static)
        except ArgumentsError as error:
            if isinstance(self.fun, type):
                error.hint = self.hint
            raise


#: The hint if a pass is for symbolic sizes and no argument has one.
_NO_SIZES = (
    "--args apply to the function; with --types 'f32[n,128]', they apply to the program after "
    "the passes"
)


def find(
    target: str,
    args: str | None = None,
    factory: bool = False,
    types: str | None = None,
    symbolic: bool = False,
    specs: Specs = NO_SPECS,
    **static: Unpack[StaticArguments],
) -> Entry:
    """Return the function that TARGET names, with the arguments of `--args` or its own example.

    Args:
        target: The TARGET. If it is written as a call, it is a factory.
        args: The text of `--args`, which takes precedence over the factory's and example arguments.
        factory: Whether to call the target, which returns the function and its arguments.
        types: The types to trace with. `args` are then for the program after the passes.
        symbolic: Whether passes need a program with symbols. If `args` have none and the function's
            own types do, `args` are for the program after the passes.
        specs: The shardings of arguments and results.
        static: The static arguments, as in options of `jax.jit`.

    Raises:
        TargetError: If the target cannot be found, or a factory returns something else.
        ArgumentsError: If the arguments cannot be read or do not fit.
        UserFunctionError: If the user's code raises.
    """
    found = resolve(target)
    start = time.perf_counter()
    factory = factory or found.call is not None
    fun, own = _call_factory(found, target) if factory else (found.value, None)
    seconds = time.perf_counter() - start
    hint = target_hint(fun, target, args or types or suggestion(fun), factory)
    call, after = _call(found, fun, own, args, types, symbolic, static)
    if symbolic and call and not (after or _symbols(call)):
        hint = hint or _NO_SIZES
    known = call or _example(fun, found)
    if known is None:
        require_no_arguments(fun, target, hint)
    positional, named = known or ((), {})
    name = function_name(fun)
    if name == "lambda" and not factory:
        name = found.name.rpartition(".")[2]
    return Entry(
        name, fun, positional, named, static, target, hint, seconds, after, found.roots, specs
    )


def _call(
    found: Target,
    fun: Callable,
    own: Arguments | None,
    args: str | None,
    types: str | None,
    symbolic: bool,
    static: StaticArguments,
) -> tuple[Arguments | None, Arguments | None]:
    """Return the arguments to `find`, if any, and those of the program after the passes."""
    given = None if args is None else argspec.read_args(args, found.module)
    if types is None and (given is None or not symbolic or _symbols(given)):
        return given or own, None
    own = own or _example(fun, found)
    known = ParameterTypes.read(fun, types)
    if types is None and not _symbols((own, known.leaves)):
        return given, None
    if given is not None:
        return typed_call(fun, known, own, given, **static)
    if own is None:
        return _by_position(fun, *argspec.read_args(types or "", found.module, "types")), None
    return typed_call(fun, known, own, ((), {}), **static)[0], None


def _by_position(fun: Callable, positional: tuple, named: Mapping[str, Any]) -> Arguments:
    """Move arguments given by name to their positions, since passes count positions."""
    names, named = positional_names(fun, 0), dict(named)
    while len(positional) < len(names) and names[len(positional)] in named:
        positional = (*positional, named.pop(names[len(positional)]))
    return positional, named


def _symbols(arguments: object) -> list[Any]:
    """Return the symbolic dimensions among the sizes of arguments."""
    return symbolic_sizes(jax.tree.leaves(arguments))


def _call_factory(found: Target, target: str) -> tuple[Callable, Arguments | None]:
    """Call a factory, and return its function, and its arguments if it returns any."""
    known = signature(found.value)
    if found.call is None and known is not None and required(known):
        raise TargetError(
            f"the factory {shown_signature(found.value)} cannot be called without arguments",
            class_hint(found.value)
            or (
                f'write them in TARGET: "{target}(...)"; or omit --factory to trace the function '
                "itself"
            ),
        )
    args, kwargs = argspec.read_values(found.call or "", found.module, f"the call of {found.name}")
    if known is not None:
        try:
            known.bind(*args, **kwargs)
        except TypeError as error:
            message = f"the arguments do not fit {shown_signature(found.value)}: {error}"
            raise TargetError(message) from None
    try:
        result = found.value(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise _user_error(f"the factory {found.name}", error) from error
    if callable(result):
        return result, None
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        given = (
            f"{len(result)} values" if isinstance(result, tuple | list) else _described_type(result)
        )
        raise TargetError(f"the factory {found.name} returned {given}", _FACTORY_GIVES)
    fun, args, kwargs = (*result, {})[:3]
    for good, what, value in (
        (callable(fun), "function", fun),
        (isinstance(args, tuple | list), "args", args),
        (isinstance(kwargs, Mapping), "kwargs", kwargs),
    ):
        if not good:
            message = f"the factory {found.name} returned {_described_type(value)} for its {what}"
            raise TargetError(message, _FACTORY_GIVES)
    return fun, (tuple(args), dict(kwargs))


# --- example arguments ------------------------------------------------------------------------


def _example(fun: object, found: Target) -> Arguments | None:
    """Return the example arguments of a callable or of a function that it wraps."""
    for owner, bound in _wrapped(fun):
        held = getattr(owner, "example_args", None)
        if held is None:
            continue
        example = _as_example(held, found)
        args, kwargs = argspec.read_strings(
            (example.args, dict(example.kwargs)), _module_of(owner, found)
        )
        for partial in bound:
            args = args[len(partial.args) :]
            kwargs = {k: v for k, v in kwargs.items() if k not in partial.keywords}
        return args, kwargs
    return None


def _wrapped(fun: Any) -> Iterator[tuple[Any, list[functools.partial]]]:
    """Yield a callable and each function that it wraps, with the partials around it."""
    bound: list[functools.partial] = []
    seen: set[int] = set()
    while fun is not None and id(fun) not in seen:
        seen.add(id(fun))
        yield fun, list(bound)
        if isinstance(fun, functools.partial):
            bound.insert(0, fun)
            fun = fun.func
        elif inspect.isroutine(fun) or hasattr(fun, "__wrapped__"):
            fun = getattr(fun, "__func__", None) or getattr(fun, "__wrapped__", None)
        else:
            fun = type(fun).__call__ if callable(fun) else None


def _module_of(owner: object, found: Target) -> ModuleType:
    """Return the module for `ref` in an example: where the function is defined, if known."""
    name = None if isinstance(owner, functools.partial) else getattr(owner, "__module__", None)
    return sys.modules.get(name or "", found.module)


def _as_example(held: object, found: Target) -> Example:
    if callable(held):
        try:
            held = held()
        except (Exception, SystemExit) as error:
            raise _user_error(f"example_args of {found.name}", error) from error
    if isinstance(held, Example):
        return held
    if not isinstance(held, tuple | list):
        raise ArgumentsError(
            f"example_args of {found.name} is {_described_type(held)}",
            "it must be a tuple of the arguments, or a function that returns one",
        )
    return Example(tuple(held), {})


def _user_error(what: str, error: BaseException) -> UserFunctionError:
    said = described(error)
    return UserFunctionError(f"{what} raised {said}", module_hint(said))


def _described_type(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
