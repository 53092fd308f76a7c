"""Convert a program to a function, and trace a transformed function to a program.

The function evaluates the program equation by equation, so JAX's transformations see the same
operations, from the same source locations, as if they ran the user's own function.

The passes in `transforms` are JAX's own transformations, with the options of JAX's functions. No
user code runs again, except the rules of custom derivatives, which are Python functions in a
program that was traced in this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jax.extend.core.primitives import jit_p
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    UnsupportedError,
    UserFunctionError,
    described,
    user_traceback,
)
from jaxprtool.ir.arguments import Changed
from jaxprtool.ir.backends import process_cache
from jaxprtool.ir.custom_rules import has_rule, holds_ended_tracer, refused, with_closed_over
from jaxprtool.ir.equations import bodies, equations, named
from jaxprtool.ir.equivalence import Unkeyable, parameters_key
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import holds_jaxpr, views
from jaxprtool.ir.symbols import symbols_of
from jaxprtool.ir.trees import paths, unique
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Params
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.passes import Pass

if TYPE_CHECKING:
    from jaxprtool.ir.kernel_calls import KernelCall

#: The maximum number of characters of JAX's error message that are shown.
_LONGEST_REASON = 300


@dataclass(frozen=True)
class WithAux(Pass):
    """A transformation of a function that may return auxiliary data.

    Args:
        has_aux: The result is a pair of the output to transform and auxiliary data.

    Raises:
        ArgumentsError: With `has_aux`, if the result is not a pair.
    """

    preserves: ClassVar[bool] = False

    has_aux: bool = False


def function_of(program: Program, name: str | None = None) -> Callable[..., Any]:
    """Return the function of a program, with its own name or another; for use under a trace."""
    evaluate = jaxcompat.jaxpr_as_fun(program.jaxpr)

    def fun(*args: object, **kwargs: object) -> object:
        return jax.tree.unflatten(program.out_tree, evaluate(*jax.tree.leaves((args, kwargs))))

    fun.__name__ = fun.__qualname__ = name or program.name
    return fun


def differentiable_function_of(program: Program) -> Callable[..., Any]:
    """Return the function of a program, as `function_of` does, for JAX to differentiate.

    JAX caches the derivative of a jit, but derives an equation of a jaxpr each time. So equations
    are called through jits that JAX inlines, as the functions of `jax.numpy` are. The derivative is
    the same, and takes half the time.
    """
    if symbols_of(program.jaxpr):  # sizes of different scopes cannot be compared
        return function_of(program)
    eqns = [_called(eqn) for eqn in program.jaxpr.eqns]
    return function_of(program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns)))


def _called(eqn: JaxprEqn) -> JaxprEqn:
    """Return a call of an equation that JAX inlines; the equation if it has effects or bodies."""
    values = eqn.params.values()
    if (
        eqn.effects
        or eqn.primitive.name in views
        or holds_jaxpr(values)
        or any(map(callable, values))
    ):
        return eqn
    try:
        params, _ = parameters_key(eqn)
    except Unkeyable:
        return eqn
    types = tuple([v.aval for v in (*eqn.invars, *eqn.outvars)])
    key = eqn.primitive, params, types, eqn.ctx
    if key not in _calls:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = jaxcompat.inlined_call_params(eqn)
    return eqn.replace(primitive=jit_p, params=_calls[key])


#: The parameters of calls, by what determines an equation except its operands. JAX caches the
#: derivative of a call by the identity of its jaxpr.
_calls: dict[Hashable, Params] = process_cache({})

#: The maximum number of these.
_MOST_CALLS = 10_000


def as_pair(program: Program) -> Program:
    """Return a program with the tuple (result, new state of objects) in place of a `Changed`."""
    node = program.out_tree.node_data()
    if node is None or node[0] is not Changed:
        return program
    pair = PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, (tuple, None), program.out_tree.children()
    )
    return program.replace(out_tree=pair)


def retraced(
    program: Program,
    transform: str,
    fun: Callable[..., Any],
    *,
    in_tree: PyTreeDef | None = None,
    avals: Sequence[Aval] | None = None,
    arg_names: Sequence[str] | None = None,
    out_names: Sequence[str] | None = None,
    hint: str | None = None,
) -> Program:
    """Trace `fun` on arguments of the program's types, or of the types `avals`.

    The result has the constants of the program, and those that JAX adds. `transform` is the name of
    the transformation in errors. Raises UnsupportedError if JAX cannot transform the program, with
    the source line of the equation at fault if it is known, and UserFunctionError if the rule of a
    custom derivative raises.
    """
    in_tree = program.in_tree if in_tree is None else in_tree
    arg_names = program.arg_names if arg_names is None else unique(arg_names)
    results: list[Any] = []

    def flat(*leaves: object) -> list[object]:
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        out = fun(*args, **kwargs)
        flat_out, tree = jax.tree.flatten(out)
        results[:] = tree, paths("result", out)
        return flat_out

    with trace_errors_reported(program, transform, hint), jaxcompat.axes_bound(program.axis_env):
        avals = program.in_avals if avals is None else avals
        jaxpr = with_closed_over(jaxcompat.trace_flat(flat, program.name, avals))
        if jaxcompat.some_ended() and holds_ended_tracer(jaxpr):
            raise refused(program.jaxpr, f"{transform} of {program.name}")
    _check_forward(program, transform, jaxpr)
    out_tree, default_names = results
    out_names = default_names if out_names is None else unique(out_names)
    return program.replace(
        jaxpr=with_names(jaxpr, program.name, arg_names, out_names),
        in_tree=in_tree,
        out_tree=out_tree,
        arg_names=tuple(arg_names),
        out_names=tuple(out_names),
    )


def with_names(
    jaxpr: ClosedJaxpr, name: str, arg_names: Sequence[str], out_names: Sequence[str]
) -> ClosedJaxpr:
    """Return a closed jaxpr with the names of a program, as JAX keeps them for debugging."""
    names = {"arg_names": tuple(arg_names), "result_paths": tuple(out_names)}
    debug = jaxpr.debug_info._replace(func_src_info=name, **names)
    return jaxcompat.replace_jaxpr(jaxpr, debug_info=debug)


def _check_forward(program: Program, transform: str, jaxpr: ClosedJaxpr) -> None:
    """Refuse forward mode of custom_vjp functions, which JAX traces but cannot run or compile."""
    for eqn in equations(jaxcompat.open_jaxpr(jaxpr)):
        if eqn.primitive.name == "custom_lin":
            raise UnsupportedError(
                f"{transform} of {program.name}: the {named(eqn)} is a custom_vjp function, "
                "which has no forward mode",
                "use `grad`, `jacrev` or `vjp`, which differentiate in reverse mode",
            )


@contextmanager
def trace_errors_reported(
    program: Program, transform: str, hint: str | None = None
) -> Iterator[None]:
    """Report an error of JAX in a transformation as a `JaxprToolError`, in one line."""
    try:
        yield
    except JaxprToolError:
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise refused(program.jaxpr, f"{transform} of {program.name}") from error
    except Exception as error:  # JAX's rules raise many types, and a user's rules any
        if user_traceback(error):
            raise UserFunctionError(f"{transform} of {program.name}: {described(error)}") from error
        kernel = _kernel(program, error)
        if kernel is not None:
            raise UnsupportedError(
                f"{transform} of {program.name}: JAX has no rule for the kernel "
                f"'{kernel.name}', the {named(kernel.eqn)}",
                "give the function that calls the kernel its derivative with `jax.custom_vjp`",
            ) from error
        message = f"{transform} of {program.name}{_place(program, error)}: {_reason(error)}"
        raise UnsupportedError(message, hint) from error


def _kernel(program: Program, error: Exception) -> KernelCall | None:
    """Return the kernel that JAX could not transform, or None.

    JAX's derivative of a simple kernel is one kernel of values and tangents, which has no inverse.
    """
    if not (jaxcompat.raised_by_pallas(error) or "Linearization failed" in str(error)):
        return None
    return next(_without_rule(jaxcompat.open_jaxpr(program.jaxpr)), None)


def _without_rule(jaxpr: Jaxpr) -> Iterator[KernelCall]:
    """Yield the kernels outside of functions with a derivative of their own."""
    from jaxprtool.ir.kernel_calls import kernel_call  # few programs have kernels

    for eqn in jaxpr.eqns:
        if (kernel := kernel_call(eqn)) is not None:
            yield kernel
        elif not has_rule(eqn):
            for _, body in bodies(eqn):
                yield from _without_rule(body)


def _place(program: Program, error: Exception) -> str:
    """Return the source line of the equation at fault: JAX attaches its traceback to the error."""
    frames = [] if error.__cause__ is None else user_traceback(error.__cause__)  # type: ignore[arg-type]
    source_frames = [
        UserFrame(frame.filename, frame.lineno or 0, frame.name, 0, 0, 0)
        for frame in reversed(frames)
    ]
    shown = frames_now(program.roots)
    text = shown.place(shown.location_in(source_frames))
    return f" at {text}" if text else ""


def _reason(error: Exception) -> str:
    if isinstance(error, AssertionError):  # an assumption of one of JAX's rules
        return "JAX's rule makes an assumption that does not hold"
    text = " ".join(str(error).partition("\n\n")[0].split())
    text = text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
    return text or type(error).__name__


# --- arguments ------------------------------------------------------------------------------------


def positional(program: Program) -> list[list[int]]:
    """Return the flat arguments of each positional argument of a program."""
    groups: list[list[int]] = []
    start = 0
    for tree in program.in_tree.children()[0].children():
        groups.append(list(range(start, start + tree.num_leaves)))
        start += tree.num_leaves
    return groups


def positional_roots(program: Program) -> list[str]:
    """Return the name of each positional argument of a program; "" if it has no arrays."""
    names = [program.arg_names[flat[0]] if flat else "" for flat in positional(program)]
    return [root_of(name) for name in names]


def chosen(
    program: Program, transform: str, option: str, numbers: int | Sequence[int]
) -> tuple[int, ...]:
    """Return the positions, counted from 0, of the arguments in an option such as `argnums`.

    Raises ArgumentsError if a positional argument does not exist.
    """
    count = len(positional(program))
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    for number in numbers:
        if not -count <= number < count:
            has = f"it has {count}" if count else "it has none"
            raise ArgumentsError(
                f"{transform}: {program.name} has no positional argument {number} for {option}; "
                f"{has}",
                f"its arguments are: {_roots(program)}" if program.arg_names else None,
            )
    return tuple(number % count for number in numbers)


def chosen_argnums(
    program: Program, transform: str, argnums: int | Sequence[int]
) -> tuple[int, ...]:
    """Return the positions of the arguments in `argnums`.

    Raises ArgumentsError as `chosen` does, and if `argnums` is empty or has duplicates, for which
    JAX's own message is unclear.
    """
    positions = chosen(program, transform, "argnums", argnums)
    if not positions:
        raise ArgumentsError(f"{transform}: argnums names no argument of {program.name}")
    if len(set(positions)) < len(positions):
        raise ArgumentsError(f"{transform}: argnums names an argument of {program.name} twice")
    return positions


def _roots(program: Program) -> str:
    """Return the names of the whole arguments of a program: `params` for `params['w']`."""
    return ", ".join(dict.fromkeys(map(root_of, program.arg_names)))


def root_of(name: str) -> str:
    """Return the name of a whole argument: `params` for `params['w']`."""
    return re.split(r"[\[.]", name)[0]


def main_results(program: Program, transform: str, has_aux: bool) -> list[int]:
    """Return the flat results to differentiate: with `has_aux`, those of the first of a pair.

    Raises ArgumentsError if the result is not a pair.
    """
    if not has_aux:
        return list(range(len(program.out_avals)))
    parts = program.out_tree.children()
    node = program.out_tree.node_data()
    if node is None or node[0] is not tuple or len(parts) != 2:
        raise ArgumentsError(
            f"{transform}: with has_aux, {program.name} must return a pair (result, aux), not "
            f"{program.out_tree}"
        )
    return list(range(parts[0].num_leaves))
