"""The assertions of `jaxprtool.testing`: each raises one AssertionError, with the user's lines."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.commands.diff.diff import diff
from jaxprtool.commands.diff.table import diff_text
from jaxprtool.commands.record.record import Recording, recorded_compilations
from jaxprtool.errors import ArgumentsError, JaxprToolError, did_you_mean
from jaxprtool.ir.documents import plural
from jaxprtool.ir.donation import donations
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.ir.equations import holders
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.traits import primitives_with
from jaxprtool.jaxcompat import DType, Jaxpr, JaxprEqn
from jaxprtool.loading.trace import function_name
from jaxprtool.testing.budgets import (
    Quantity,
    QuantityAmount,
    amount_of,
    compile_measure,
    grown_lines,
    measure,
)
from jaxprtool.testing.places import current_test
from jaxprtool.testing.snapshots import as_program, earlier, over_budget, without_frames

#: pytest leaves the frames of this module out of tracebacks.
__tracebackhide__ = True

#: The width of differences, in characters.
_WIDTH = 100

#: The most lines that a failure lists.
_MOST = 10


@without_frames
def assert_budget(
    program_or_function: object,
    /,
    *args: object,
    flops: float | str | None = None,
    peak_bytes: float | str | None = None,
    equations: int | None = None,
    compiles: int | None = None,
    collectives_bytes: float | str | None = None,
    residual_bytes: float | str | None = None,
    vmem_bytes: float | str | None = None,
    hbm_bytes: float | str | None = None,
) -> None:
    """Assert that a program stays within budgets.

    All but `compiles` and `collectives_bytes` are estimates from the jaxpr: they are the same on
    every machine. If a snapshot of the program is in the test's file, a failure names the lines
    that grew since.

    Args:
        program_or_function: A `Program`, or a function.
        args: The arguments of the function, as `jaxprtool.trace` takes them.
        flops: The maximum number of FLOPs, such as 3e9 or `"3 GFLOP"`, as `jaxprtool cost` counts
            them.
        peak_bytes: The maximum memory in use at once, in bytes or as `"16MiB"`; see `jaxprtool
            memory`.
        equations: The maximum number of equations, at every depth.
        compiles: The maximum number of programs that JAX compiles when the function is called with
            these arguments, which must be values.
        collectives_bytes: The maximum number of bytes that each device sends; see `jaxprtool
            shardings`.
        residual_bytes: The maximum number of bytes that the gradient keeps from the forward to the
            backward pass; see `jaxprtool residuals`.
        vmem_bytes: The maximum vector memory that a Pallas kernel takes; see `jaxprtool kernels`.
        hbm_bytes: The maximum number of bytes that all Pallas kernels copy; see `jaxprtool
            kernels`.

    Raises:
        AssertionError: If a budget is exceeded. The message has the lines that cost most.
        ArgumentsError: If no budget is given, or one cannot be read.
    """
    budgets: dict[Quantity, Any] = {
        "flops": flops,
        "peak_bytes": peak_bytes,
        "equations": equations,
        "residual_bytes": residual_bytes,
        "vmem_bytes": vmem_bytes,
        "hbm_bytes": hbm_bytes,
        "collectives_bytes": collectives_bytes,
        "compiles": compiles,
    }
    limits = {q: amount_of(q, value) for q, value in budgets.items() if value is not None}
    if not limits:
        raise ArgumentsError("assert_budget needs a budget", f"write one of {', '.join(budgets)}")
    # With `compiles` alone the function is not traced: it may be a whole training loop.
    traced = limits.keys() - {"compiles"}
    program = as_program(program_or_function, args) if traced else None
    call = _call(program_or_function, args) if "compiles" in limits else None
    measures = measure(program, limits, arguments=_placed(args), call=call)
    over = [measured for q, measured in measures.items() if measured.amount > limits[q]]
    if over:
        name = function_name(program_or_function) if program is None else program.name
        raise AssertionError("\n\n".join(_over_budget(name, program, over, limits)))


def _over_budget(
    name: str, program: Program | None, over: list[QuantityAmount], limits: Mapping[Quantity, float]
) -> Iterator[str]:
    """Yield a message for each measure that exceeds its budget."""
    since = None if program is None else earlier(program, current_test())
    for measured in over:
        grown: dict[str, Any] = {}
        if since is not None and program is not None and measured.quantity != "compiles":
            grown = _grown(*since, program, measured.quantity)
        yield over_budget(name, measured, limits[measured.quantity], **grown)


def _call(function: object, args: tuple[object, ...]) -> Callable[[], object] | None:
    """Return the call to count compilations in. Raises ArgumentsError for types as arguments."""
    if isinstance(function, Program) or not callable(function):
        return None
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        hint = "give arrays; types are enough for the other budgets"
        raise ArgumentsError("compiles calls the function, so its arguments must be values", hint)
    return lambda: function(*args)


def _placed(args: tuple[object, ...]) -> list[object]:
    """Return the flat arguments if some lie on several devices, otherwise []."""
    leaves = jax.tree.leaves(args)
    several = (len(leaf.sharding.device_set) > 1 for leaf in leaves if isinstance(leaf, jax.Array))
    return leaves if any(several) else []


def _grown(before: Program, since: str, after: Program, quantity: Quantity) -> dict[str, Any]:
    try:
        return {"since": since, "grown": grown_lines(before, after, quantity)}
    except JaxprToolError:  # the snapshot cannot be measured, as on fewer devices
        return {}


@without_frames
def assert_no(program_or_function: object, banned: object, /, *args: object) -> None:
    """Assert that a program has no equation of a primitive, or no value of a dtype.

    Args:
        program_or_function: A `Program`, or a function.
        banned: The name of a primitive, `"sort"`, or a dtype, `jnp.float64` or `"f64"`. Bodies of
            loops, branches and calls are searched too.
        args: The arguments of the function, as `jaxprtool.trace` takes them.

    Raises:
        AssertionError: If there is one. The message has the lines.
        ArgumentsError: If JAX knows no such primitive or dtype.
    """
    wanted = require_bannable(banned)
    program = as_program(program_or_function, args)
    if places := banned_places(program, wanted):
        raise AssertionError(banned_text(program.name, wanted, places))


def banned_places(program: Program, wanted: str | DType) -> Counter[str]:
    """Count the equations of a primitive, or the values of a dtype, by source line."""
    about = program_signature(program)
    frames, places = frames_now(about.roots), Counter[str]()
    if not isinstance(wanted, str):
        values = [*zip(about.jaxpr.invars, about.arguments, strict=True)]
        values += zip(about.jaxpr.constvars, about.constants, strict=True)
        has = [value for var, value in values if getattr(var.aval, "dtype", None) == wanted]
        places.update(f"{value.name}: {value.type}" for value in has)
    for around in _nested(about.jaxpr):
        eqn = around[-1]
        if _is_banned(eqn, wanted):
            places[f"{frames.line_of(around) or 'unknown line'}: {eqn.primitive.name}"] += 1
    return places


def require_bannable(banned: object) -> str | DType:
    """Return a dtype, or the name of a primitive. Raises ArgumentsError for another object."""
    if not isinstance(banned, str):
        try:
            return np.dtype(banned)  # type: ignore[call-overload,no-any-return]
        except TypeError:
            shown = f"an object of type {type(banned).__name__}"
            raise ArgumentsError(f"expected a primitive or a dtype, not {shown}") from None
    dtypes = array_dtypes()
    if banned in dtypes:
        return dtypes[banned]
    known = {*jaxcompat.registered_primitives(), *primitives_with(lambda traits: True)}
    if banned not in known:
        hint = did_you_mean(banned, [*known, *dtypes])
        raise ArgumentsError(f"JAX has no primitive or dtype '{banned}'", hint)
    return banned


def banned_text(name: str, wanted: str | DType, places: Counter[str]) -> str:
    """Return the message that a program has banned equations or values, with their lines."""
    if isinstance(wanted, str):
        count = plural(places.total(), f"{wanted} equation")
    else:
        count = f"{plural(places.total(), 'value')} of dtype {jaxcompat.short_dtype_name(wanted)}"
    lines = [f"{name} has {count}:"]
    for where, times in [*places.items()][:_MOST]:
        lines.append(f"  {where}" + (f", {times:,} times" if times > 1 else ""))
    left = len(places) - _MOST
    return "\n".join([*lines, *([f"  … {left:,} more"] if left > 0 else [])])


def _is_banned(eqn: JaxprEqn, wanted: str | DType) -> bool:
    if isinstance(wanted, str):
        return bool(eqn.primitive.name == wanted)
    return any(getattr(var.aval, "dtype", None) == wanted for var in eqn.outvars)


def _nested(jaxpr: Jaxpr) -> Iterator[list[JaxprEqn]]:
    """Yield each equation, preceded by those around it; those of a shared body once."""
    seen, todo = {jaxpr}, [(jaxpr, list[JaxprEqn]())]
    while todo:
        outer, around = todo.pop()
        inside = {id(eqn): bodies for eqn, bodies in holders(outer)}
        for eqn in outer.eqns:
            yield [*around, eqn]
            for _, body in inside.get(id(eqn), ()):
                if body not in seen:
                    seen.add(body)
                    todo.append((body, [*around, eqn]))


@without_frames
def assert_equivalent(p: object, q: object, /, *args: object) -> None:
    """Assert that two programs compute the same by the same equations.

    Names, source lines, and the order of independent equations do not matter.

    Args:
        p: A `Program`, or a function.
        q: The program to compare it with, or a function.
        args: The arguments of the functions, as `jaxprtool.trace` takes them.

    Raises:
        AssertionError: If they differ. The message has the differences, as `jaxprtool diff` shows
            them.
    """
    programs = [side if isinstance(side, Program) else as_program(side, args) for side in (p, q)]
    differences = diff(*programs)
    if not differences.is_equivalent:
        raise AssertionError(diff_text(differences, _WIDTH, None).plain())


@without_frames
def assert_donated(function: object, /, *args: object) -> None:
    """Assert that a function donates arguments, and that results reuse the memory of all of them.

    Args:
        function: A function under `jax.jit`, `nnx.jit` or `eqx.filter_jit` that donates arguments,
            or the `Program` of a function under `jax.jit`.
        args: Its arguments, as `jaxprtool.trace` takes them.

    Raises:
        AssertionError: If no argument is donated, or one cannot be used. The message has its path
            and the reason.
    """
    program = as_program(function, args)
    if failure := donation_failure(program, program.name):
        raise AssertionError(failure)


def donation_failure(program: Program, name: str) -> str:
    """Return a message if a program donates nothing, or cannot use a donated argument, else ""."""
    donated = donations(program)
    if not donated.by_result and not donated.unused:
        hint = "jax.jit takes donate_argnums or donate_argnames"
        return f"{name} donates no argument: {hint}"
    if donated.unused:
        count = plural(len(donated.unused), "donated argument")
        lines = [
            f"  {donation.argument}, {donation.type}: {donation.reason}"
            for donation in donated.unused
        ]
        return "\n".join([f"{name} cannot use {count}:", *lines])
    return ""


# --- compiles -------------------------------------------------------------------------------------
# Limit how many programs a block compiles; failures have the reasons of `jaxprtool.record`.

#: pytest leaves the frames of this module out of tracebacks.


@dataclass(frozen=True, repr=False)
class CompileLimit:
    """A `with` block that may compile a limited number of programs.

    Attributes:
        recording: The recording, which began with the test.
        at_most: The maximum number of programs.
        before: The number of programs that the test had compiled before the block.
    """

    recording: Recording
    at_most: float
    before: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            compiled = compile_measure(self.recording.compilations[self.before :])
            if compiled.amount > self.at_most:
                raise AssertionError(over_budget("the block", compiled, self.at_most))


@dataclass(frozen=True, repr=False)
class CompileCounter:
    """The fixture `jax_compiles`, which records from the start of a test.

    A reason compares a compilation with all earlier ones of the test.

    Attributes:
        recording: The recording.
    """

    recording: Recording

    @without_frames
    def __call__(self, *, at_most: int) -> CompileLimit:
        """Return a context manager that limits the number of programs that a block compiles.

        If the block compiles more, an AssertionError with the reasons is raised at its end.

        Args:
            at_most: The maximum number of programs. Single operations outside of `jit` do not
                count, nor do programs that JAX has compiled before.

        Raises:
            ArgumentsError: If `at_most` is not a number.
        """
        return CompileLimit(
            self.recording, amount_of("compiles", at_most), len(self.recording.compilations)
        )


@contextmanager
def counting_compiles() -> Iterator[CompileCounter]:
    """Record what JAX compiles in a `with` block."""
    with tempfile.TemporaryDirectory() as folder, recorded_compilations(folder) as recording:
        yield CompileCounter(recording)
