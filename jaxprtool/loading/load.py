"""Loading of a function with its arguments, ready to be traced, from a TARGET and `--args`.

Arguments come from `--args`, else from the factory that a TARGET is or calls, else from the
function's own example arguments.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, Unpack

import jax

from jaxprtool.errors import ArgumentsError, TargetError, UserFunctionError, described
from jaxprtool.ir.conversions import is_ref
from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.frames import Root
from jaxprtool.ir.meshes import NO_SPECS, Specs
from jaxprtool.ir.program import Program
from jaxprtool.ir.symbols import symbolic_sizes
from jaxprtool.jaxcompat import Aval
from jaxprtool.loading import Example, argspec
from jaxprtool.loading.target import (
    Target,
    class_hint,
    methods_hint,
    module_hint,
    require_arrays,
    resolve,
    target_hint,
)
from jaxprtool.loading.trace import (
    BoundCall,
    StaticArguments,
    bind_arguments,
    function_name,
    positional_names,
    require_parameters,
    shown_signature,
    signature,
    static_places,
    trace_call,
    unwrapped,
)

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

    #: Only a program has a note.
    note: ClassVar[str] = ""

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


def find_function(
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
    resolved = resolve(target)
    start = time.perf_counter()
    factory = factory or resolved.call is not None
    fun, example_args = _call_factory(resolved, target) if factory else (resolved.value, None)
    seconds = time.perf_counter() - start
    hint = target_hint(fun, target, args or types or suggestion(fun), factory)
    call, after = _call(resolved, fun, example_args, args, types, symbolic, static)
    if symbolic and call and not (after or _symbols(call)):
        hint = hint or _NO_SIZES
    arguments = call or _example(fun, resolved)
    if arguments is None:
        require_no_arguments(fun, target, hint)
    positional, named = arguments or ((), {})
    name = function_name(fun)
    if name == "lambda" and not factory:
        name = resolved.name.rpartition(".")[2]
    return Entry(
        name, fun, positional, named, static, target, hint, seconds, after, resolved.roots, specs
    )


def _call(
    resolved: Target,
    fun: Callable,
    example_args: Arguments | None,
    args: str | None,
    types: str | None,
    symbolic: bool,
    static: StaticArguments,
) -> tuple[Arguments | None, Arguments | None]:
    """Return the arguments of `find_function`, if any, and those of the program after passes."""
    arguments = None if args is None else argspec.read_args(args, resolved.module)
    if types is None and (arguments is None or not symbolic or _symbols(arguments)):
        return arguments or example_args, None
    example_args = example_args or _example(fun, resolved)
    param_types = ParameterTypes.read(fun, types)
    if types is None and not _symbols((example_args, param_types.leaves)):
        return arguments, None
    if arguments is not None:
        return typed_call(fun, param_types, example_args, arguments, **static)
    if example_args is None:
        return _by_position(fun, *argspec.read_args(types or "", resolved.module, "types")), None
    return typed_call(fun, param_types, example_args, ((), {}), **static)[0], None


def _by_position(fun: Callable, positional: tuple, named: Mapping[str, Any]) -> Arguments:
    """Move arguments given by name to their positions, since passes count positions."""
    names, named = positional_names(fun, 0), dict(named)
    while len(positional) < len(names) and names[len(positional)] in named:
        positional = (*positional, named.pop(names[len(positional)]))
    return positional, named


def _symbols(arguments: object) -> list[Any]:
    """Return the symbolic dimensions among the sizes of arguments."""
    return symbolic_sizes(jax.tree.leaves(arguments))


def _call_factory(resolved: Target, target: str) -> tuple[Callable, Arguments | None]:
    """Call a factory, and return its function, and its arguments if it returns any."""
    sig = signature(resolved.value)
    if resolved.call is None and sig is not None and required(sig):
        raise TargetError(
            f"the factory {shown_signature(resolved.value)} cannot be called without arguments",
            class_hint(resolved.value)
            or (
                f'write them in TARGET: "{target}(...)"; or omit --factory to trace the function '
                "itself"
            ),
        )
    args, kwargs = argspec.read_values(
        resolved.call or "", resolved.module, f"the call of {resolved.name}"
    )
    if sig is not None:
        try:
            sig.bind(*args, **kwargs)
        except TypeError as error:
            message = f"the arguments do not fit {shown_signature(resolved.value)}: {error}"
            raise TargetError(message) from None
    try:
        result = resolved.value(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise _user_error(f"the factory {resolved.name}", error) from error
    if callable(result):
        return result, None
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        returned = (
            f"{len(result)} values" if isinstance(result, tuple | list) else _described_type(result)
        )
        raise TargetError(f"the factory {resolved.name} returned {returned}", _FACTORY_GIVES)
    fun, args, kwargs = (*result, {})[:3]
    for good, what, value in (
        (callable(fun), "function", fun),
        (isinstance(args, tuple | list), "args", args),
        (isinstance(kwargs, Mapping), "kwargs", kwargs),
    ):
        if not good:
            message = (
                f"the factory {resolved.name} returned {_described_type(value)} for its {what}"
            )
            hint = methods_hint(value, "its ") if what == "function" else ""
            raise TargetError(message, f"return {hint}" if hint else _FACTORY_GIVES)
    return fun, (tuple(args), dict(kwargs))


# --- example arguments ------------------------------------------------------------------------


def _example(fun: object, resolved: Target) -> Arguments | None:
    """Return the example arguments of a callable or of a function that it wraps."""
    for owner, bound in _wrapped(fun):
        attribute = getattr(owner, "example_args", None)
        if attribute is None:
            continue
        example = _as_example(attribute, resolved)
        args, kwargs = argspec.read_strings(
            (example.args, dict(example.kwargs)), _module_of(owner, resolved)
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


def _module_of(owner: object, resolved: Target) -> ModuleType:
    """Return the module for `ref` in an example: where the function is defined, if known."""
    name = None if isinstance(owner, functools.partial) else getattr(owner, "__module__", None)
    return sys.modules.get(name or "", resolved.module)


def _as_example(attribute: object, resolved: Target) -> Example:
    if callable(attribute):
        try:
            attribute = attribute()
        except (Exception, SystemExit) as error:
            raise _user_error(f"example_args of {resolved.name}", error) from error
    if isinstance(attribute, Example):
        return attribute
    if not isinstance(attribute, tuple | list):
        raise ArgumentsError(
            f"example_args of {resolved.name} is {_described_type(attribute)}",
            "it must be a tuple of the arguments, or a function that returns one",
        )
    return Example(tuple(attribute), {})


def _user_error(what: str, error: BaseException) -> UserFunctionError:
    said = described(error)
    return UserFunctionError(f"{what} raised {said}", module_hint(said))


def _described_type(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


# --- missing arguments ----------------------------------------------------------------------------
# Suggest `--args`, a factory or `record` if the arguments of a function are missing.
#
# Arrays can be written on the command line. Models and optimizers are Python objects: a factory
# creates them by abstract evaluation, so that no values are computed.

#: The suggestion for --args by a parameter's name; any other parameter is suggested an array.
_SUGGESTIONS = {
    "key": "key(0)",
    "rng": "key(0)",
    "params": "{'w': f32[3,4]}",
    "training": "static(False)",
    "train": "static(False)",
    "deterministic": "static(True)",
}
_ARRAY = "f32[8,128]"

#: Names that libraries' examples give to parameters that are objects.
_OBJECTS = {
    *("model", "module", "net", "network", "agent", "policy", "solver", "metrics"),
    *("optimizer", "optim", "opt", "opt_state", "state", "train_state"),
}

#: Names of parameters that are the model.
_MODELS = {"model", "module", "net", "network"}

#: How each library makes a model without values, by the library's usual name in a file.
_ABSTRACT = {
    "nnx": "nnx.eval_shape(lambda: {model}({sizes}rngs=nnx.Rngs(0)))",
    "eqx": "eqx.filter_eval_shape({model}, {sizes}key=jax.random.key(0))",
}


def require_no_arguments(fun: Callable, target: str, hint: str | None) -> None:
    """Raise ArgumentsError, with a suggestion, if a function needs arguments.

    Args:
        fun: The function.
        target: The target that names it, without a call.
        hint: A suggestion to use instead, if one is known.
    """
    sig = signature(fun)
    if sig is not None and not (needed := required(sig)):
        return
    objects = _objects(fun, [p.name for p in needed]) if sig else []
    if objects and not hint:
        hint = _factory_hint(fun, target, [p.name for p in needed], objects)
    raise ArgumentsError(
        f"{shown_signature(fun)} needs arguments",
        hint
        or f'pass them, e.g. --args "{suggestion(fun)}", or attach @jaxprtool.example(...) to the '
        "function",
    )


def suggestion(fun: Callable) -> str:
    """Return a text for --args that fits the number and names of a function's parameters."""
    parts: list[str] = []
    by_name, sig = False, signature(fun)
    for parameter in required(sig) if sig else ():
        value = _SUGGESTIONS.get(parameter.name, _ARRAY)
        if parameter.annotation in (jax.Ref, "jax.Ref", "Ref"):
            value = f"new_ref({_ARRAY})"
        by_name = by_name or parameter.kind is parameter.KEYWORD_ONLY
        parts.append(f"{parameter.name}={value}" if by_name else value)
    return ", ".join(parts) or _ARRAY


def required(sig: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters without a default value."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p
        for p in sig.parameters.values()
        if p.default is inspect.Parameter.empty and p.kind not in optional
    ]


# --- objects ----------------------------------------------------------------------------------


def _objects(fun: Callable, names: Sequence[str]) -> list[str]:
    """Return the parameters that are not arrays, judged by their names and use in the function."""
    used = set(_used_as_objects(fun))
    return [name for name in names if name in used or name.lower() in _OBJECTS]


def _used_as_objects(fun: Callable) -> Iterator[str]:
    """Yield names that a function calls, or whose attributes it reads that arrays do not have."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(fun))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return  # its source is unavailable
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if not hasattr(jax.Array, attribute):
                    yield name


def _factory_hint(fun: Callable, target: str, names: Sequence[str], objects: list[str]) -> str:
    """Return a factory to paste into the module, and the command that uses it."""
    place, _, name = target.rpartition(":")
    module = inspect.getmodule(inspect.unwrap(fun))
    array = 'jax.ShapeDtypeStruct((8, 128), "float32")'
    call_args = ", ".join(arg if arg in objects else array for arg in names)
    listed = " and ".join([", ".join(objects[:-1]), objects[-1]] if objects[1:] else objects)
    lines = (
        f"{listed} {'are Python objects' if objects[1:] else 'is a Python object'}; create "
        f"{'them' if objects[1:] else 'it'} in a factory, and trace {place}:case --factory",
        "  def case():",
        *(f"      {arg} = {_made(module, arg)}" for arg in objects),
        f"      return {name}, ({call_args}{'' if names[1:] else ','})",
        "or record a script that calls the function: jaxprtool record SCRIPT.py",
    )
    return "\n".join(lines)


def _made(module: ModuleType | None, name: str) -> str:
    """Return an expression that makes an object, without values if it is a model of a library."""
    namespace = vars(module) if module else {}
    library = next((candidate for candidate in _ABSTRACT if candidate in namespace), None)
    models = [value for value in namespace.values() if _is_model(value, module)]
    if library is None or not models or name.lower() not in _MODELS:
        return "...  # as your script makes it"
    model = models[-1]  # what is defined last usually is the whole model
    needed = [p.name for p in required(inspect.signature(model.__init__))]
    sizes = "".join(f"{arg}=..., " for arg in needed[1:] if arg not in ("rngs", "key"))
    return _ABSTRACT[library].format(model=model.__name__, sizes=sizes)


def _is_model(value: object, module: ModuleType | None) -> bool:
    """Return True for a class of modules that is defined in a file."""
    return (
        isinstance(value, type)
        and module is not None
        and value.__module__ == module.__name__
        and any(base.__name__ == "Module" for base in value.__mro__[1:])
    )


# --- typed call -----------------------------------------------------------------------------------
# Find the types to trace a function with if `--args` are for the program after the passes.
#
# A pass may add arguments, as `ragged` adds lengths, or change their types. The function is then
# traced with the given types, those of its parameters, or those of its example arguments. An
# argument without a type has the type of its value in `--args`.

#: Positional and keyword arguments.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def typed_call(
    fun: Callable,
    types: ParameterTypes,
    example_args: Arguments | None,
    arguments: Arguments,
    **static: Unpack[StaticArguments],
) -> tuple[Arguments, Arguments]:
    """Return the arguments to trace a function with, and those of the program after the passes.

    Args:
        fun: The function.
        types: The known types of its parameters.
        example_args: Its example arguments, or those of a factory.
        arguments: The arguments of the program, including the function's static ones. A parameter
            with a default and no type must be given by name, because passes add positional
            arguments.
        static: The static arguments, as in options of `jax.jit`.
    """
    args, kwargs = arguments
    positions, names = static_places(fun, args, kwargs, **static)
    after = (
        tuple(arg for i, arg in enumerate(args) if i not in positions),
        {name: arg for name, arg in kwargs.items() if name not in names},
    )
    example_args = types.call(fun, positions, names) or example_args
    if example_args is None:
        call = _of_the_function(fun, types, arguments, positions)
    else:
        call = (
            tuple(
                args[i] if i in positions and i < len(args) else arg
                for i, arg in enumerate(example_args[0])
            ),
            example_args[1] | {name: arg for name, arg in kwargs.items() if name in names},
        )
    traced = types.replaced(*_with_rows(types, *call), lambda values: [v.type for v in values])
    return traced, after


def _of_the_function(
    fun: Callable, types: ParameterTypes, arguments: Arguments, static: set[int]
) -> Arguments:
    """Return the arguments that the function takes, without those that passes add."""
    args, kwargs = arguments
    sig = signature(fun)
    parameters: Mapping[str, inspect.Parameter] = sig.parameters if sig else {}
    needed = {name for name, p in parameters.items() if p.default is p.empty} | {*types.by_name}
    positional = positional_names(fun, len(types.positions))
    last = max([*static, *(i for i, name in enumerate(positional) if name in needed)], default=-1)
    return args[: last + 1], {
        name: arg for name, arg in kwargs.items() if name in parameters or name in types.by_name
    }


def _with_rows(types: ParameterTypes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return a call with examples of different lengths replaced by rows."""
    names = [*types.positions, *[""] * len(args)]
    return (
        tuple(_rows(types.by_name.get(name), arg) for name, arg in zip(names, args, strict=False)),
        {name: _rows(types.by_name.get(name), arg) for name, arg in kwargs.items()},
    )


def _rows(type_: Any, arg: Any) -> Any:
    """Return an argument with each Ragged replaced by rows where an array type is expected."""
    from jaxprtool.ir.ragged import ragged_parts

    if isinstance(type_, dict) and type(arg) is dict:
        return {name: _rows(type_.get(name), part) for name, part in arg.items()}
    if isinstance(type_, list | tuple) and type(arg) is type(type_) and len(arg) == len(type_):
        return type(arg)(map(_rows, type_, arg))
    parts = ragged_parts(arg) if hasattr(type_, "shape") else None
    return parts[0] if parts else arg


# --- parameter types ------------------------------------------------------------------------------
# Types of parameters: texts in the notation of `--args`, given separately or in annotations.
#
#     def loss(params, tokens: "i32[n]"): ...
#
# Types of example arguments (`@jaxprtool.example`) with symbols are used as well. A parameter
# without a type accepts any value.

#: Types as a user gives them.
TypesOption = str | Mapping[str, Any] | Sequence[Any] | None


@dataclass(frozen=True)
class TypedValue:
    """An array in the arguments of a call, its path, and its type in the parameter."""

    path: str
    value: Any
    type: jax.ShapeDtypeStruct | Aval

    @property
    def aval(self) -> Aval:
        """The abstract value of the type."""
        return jax.core.ShapedArray(self.type.shape, self.type.dtype)

    def check_dtype(self, name: str) -> None:
        """Raise ArgumentsError, which has the function's `name`, if the array has another dtype."""
        wanted = f"but its type is {type_of(self.aval)}"
        try:
            aval = jax.typeof(self.value)
        except TypeError:
            raise ArgumentsError(
                f"argument '{self.path}' of {name} is not an array, {wanted}"
            ) from None
        if jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True) != self.type.dtype:
            raise ArgumentsError(f"argument '{self.path}' of {name} is {type_of(aval)}, {wanted}")


@dataclass(frozen=True, eq=False)
class ParameterTypes:
    """Types of some parameters of a function; holds no reference to the function.

    Attributes:
        name: The name of the function.
        positions: The names of the positional parameters.
        by_name: A type, or a pytree of types, by the name of the parameter.
        are_given: Whether the user gave them; otherwise they are the function's own.
    """

    name: str
    positions: tuple[str, ...]
    by_name: Mapping[str, Any]
    are_given: bool = False

    @classmethod
    def read(cls, fun: Callable, option: TypesOption) -> ParameterTypes:
        """Return the types given for a function, or else its own.

        Its own are annotations, or the types with symbols in its example arguments.

        Args:
            fun: The function.
            option: The types in the notation of the command line's `--args`, `"tokens=i32[n]"`; or
                a dict by parameter name, or a sequence in parameter order with None for any type:
                texts, `jax.ShapeDtypeStruct`s or pytrees of these.

        Raises:
            ArgumentsError: For types that cannot be read, and for a parameter that the function
                lacks.
        """
        named: Mapping[str, Any] = {}
        positional: Sequence[Any] = ()
        are_given = option is not None
        if option is None:
            option = _annotations(fun)
        if not option:
            positional, named = _attached_example(fun)
        elif isinstance(option, str):
            positional, named = argspec.read_args(option, what="types")
        elif isinstance(option, Mapping):
            named = argspec.read_strings(dict(option))
        else:
            argspec.require_sequence(option)
            positional = argspec.read_strings(list(option))
        require_parameters(fun, named, "types")
        _check_count(fun, len(positional))
        names = tuple(positional_names(fun, len(positional)))
        by_name = {**dict(zip(names, positional, strict=False)), **named}
        by_name = {name: tree for name, tree in by_name.items() if tree is not None}
        types = jax.tree.map(_type, by_name, is_leaf=lambda leaf: leaf is None)
        return cls(function_name(fun), names, types, are_given)

    def call(
        self, fun: Callable, static: Collection[int], static_names: Collection[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call of these types, if all required parameters have one.

        Static arguments are replaced by None.
        """
        sig = signature(fun)
        if not self.are_given or sig is None or _ANY in jax.tree.leaves(self.by_name):
            return None
        parameters = sig.parameters
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        for i, (name, parameter) in enumerate(parameters.items()):
            optional = parameter.default is not parameter.empty or parameter.kind in variadic
            if not (optional or name in self.by_name or i in static or name in static_names):
                return None
        used = [i for i, name in enumerate(self.positions) if name in self.by_name]
        count = max([*static, *used], default=-1) + 1
        names = positional_names(fun, count)[:count]
        if any(name not in self.by_name and i not in static for i, name in enumerate(names)):
            return None
        named = {name: tree for name, tree in self.by_name.items() if name not in names}
        return tuple(map(self.by_name.get, names)), named

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
        """All types."""
        return [leaf for leaf in jax.tree.leaves(self.by_name) if leaf is not _ANY]

    def replaced(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        new: Callable[[list[TypedValue]], Sequence[Any]],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with typed arrays replaced by their entries in `new`.

        A single type for a pytree applies to all of its arrays.

        Raises:
            ArgumentsError: If the types of a parameter and the argument differ in structure.
        """
        arguments = self.given(args, kwargs)
        values = self.values(arguments)
        replacements = iter(new([value for value in values if value is not None]))
        leaves, tree = jax.tree.flatten(arguments)
        flat = [
            value if typed is None else next(replacements)
            for value, typed in zip(leaves, values, strict=True)
        ]
        return self.put(args, kwargs, jax.tree.unflatten(tree, flat))

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call whose parameters have types, by parameter name."""
        arguments = {name: args[i] for name, i in self._places.items() if i < len(args)}
        return arguments | {name: arg for name, arg in kwargs.items() if name in self.by_name}

    def put(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with those returned by `given` replaced."""
        placed = list(args)
        for name, i in self._places.items():
            if i < len(placed):
                placed[i] = arguments[name]
        return tuple(placed), {name: arguments.get(name, arg) for name, arg in kwargs.items()}

    @cached_property
    def _places(self) -> dict[str, int]:
        """The position of each positional parameter that has a type."""
        return {name: i for i, name in enumerate(self.positions) if name in self.by_name}

    def values(self, arguments: Mapping[str, Any]) -> list[TypedValue | None]:
        """Return each leaf of arguments by name with its type; None if any type is accepted.

        Raises:
            ArgumentsError: If the types of a parameter and the argument differ in structure.
        """
        types: list[Any] = []
        for name, value in sorted(arguments.items()):
            try:
                types += jax.tree.leaves(jax.tree.broadcast(self.by_name[name], value))
            except ValueError:
                raise ArgumentsError(
                    f"argument '{name}' of {self.name} has a different structure than its type: "
                    f"{jax.tree.structure(value)}, not {jax.tree.structure(self.by_name[name])}"
                ) from None
        leaves = jax.tree.leaves_with_path(dict(arguments))
        return [
            None if leaf_type is _ANY else TypedValue(_path(way), value, leaf_type)
            for (way, value), leaf_type in zip(leaves, types, strict=True)
        ]


#: Marks a place in a tree of types where any type is accepted.
_ANY: Any = type("AnyType", (), {"__repr__": lambda self: "None"})()


def _path(way: Sequence[Any]) -> str:
    return f"{way[0].key}{jax.tree_util.keystr(tuple(way[1:]))}"


def _type(leaf: Any) -> Any:
    if leaf is None:
        return _ANY
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ArgumentsError(f"{leaf!r} is not a type: write types as 'f32[n,128]'")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, is_ref=is_ref(leaf))


def _annotations(fun: Callable) -> Mapping[str, str]:
    """Return the annotations in the notation of `--args`, by parameter."""
    sig = signature(fun)
    dtypes = "|".join(map(re.escape, array_dtypes()))
    annotations = {}
    for parameter in sig.parameters.values() if sig else ():
        text = parameter.annotation
        if isinstance(text, str) and text[:1] in ("'", '"'):  # from __future__ import annotations
            text = ast.literal_eval(text)
        if isinstance(text, str) and re.search(rf"(?<!\w)(?:{dtypes}|key<\w+>)\[", text):
            annotations[parameter.name] = text
    return annotations


def _attached_example(fun: Callable) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the example arguments of a function, with None for those without symbols."""
    example = getattr(inspect.unwrap(fun), "example_args", None)
    if not isinstance(example, Example):
        return (), {}
    module = sys.modules.get(getattr(fun, "__module__", None) or "")
    args, kwargs = argspec.read_strings((example.args, dict(example.kwargs)), module)

    def typed(argument: Any) -> Any:
        types = jax.tree.map(lambda x: x if symbolic_sizes([x]) else None, argument)
        return types if jax.tree.leaves(types) else None

    return list(map(typed, args)), {name: typed(argument) for name, argument in kwargs.items()}


def _check_count(fun: Callable, count: int) -> None:
    sig = signature(fun)
    names = positional_names(fun, 0)
    if sig is None or any(p.kind is p.VAR_POSITIONAL for p in sig.parameters.values()):
        return
    if count > len(names):
        takes = plural(len(names), "positional argument")
        raise ArgumentsError(
            f"types has {count}, but the function takes {takes}", shown_signature(fun)
        )
