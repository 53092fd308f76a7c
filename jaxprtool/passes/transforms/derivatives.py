"""grad, value_and_grad, jacfwd, jacrev, hessian and jvp as passes, with the options of JAX's own.

    trace(loss, params, x).apply("grad")           # jax.grad(loss), of the same arguments
    trace(loss, params, x).apply("jvp")            # ((primals), (tangents)) -> (result, tangent)

`argnums` counts the program's positional arguments; keyword arguments are not differentiated. What
JAX would refuse is refused before it is traced, in terms of the program's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.program import Program
from jaxprtool.passes.base import Pass
from jaxprtool.passes.transforms.retrace import (
    chosen_argnums,
    function_of,
    main_results,
    positional,
    retraced,
)

Argnums = int | tuple[int, ...]


@dataclass(frozen=True)
class _Reverse(Pass):
    """What the derivatives in reverse mode have in common."""

    #: The positional arguments to differentiate by.
    argnums: Argnums = 0

    #: Whether the result is a pair, of what is differentiated and of what is handed on.
    has_aux: bool = False

    #: Whether the function is holomorphic; its arguments and results must then be complex.
    holomorphic: bool = False

    #: Whether to differentiate by integers too; their derivatives are of dtype float0.
    allow_int: bool = False

    preserves: ClassVar[bool] = False
    transform: ClassVar[Callable[..., Any]]
    scalar: ClassVar[bool] = False

    def __call__(self, program: Program) -> Program:
        """Raises ArgumentsError and UnsupportedError where JAX would raise an error."""
        leaves = _differentiated(program, self.name, self.argnums)
        _check_reverse_arguments(program, leaves, self.name, self.holomorphic, self.allow_int)
        outs = main_results(program, self.name, self.has_aux)
        if self.scalar:
            _check_scalar(program, outs, self.name, self.has_aux)
        _check_reverse_results(program, outs, self.name, self.holomorphic)
        options = {name: getattr(self, name) for name in ("argnums", "has_aux", "holomorphic")}
        fun = type(self).transform(function_of(program), allow_int=self.allow_int, **options)
        return retraced(program, self.name, fun)


@dataclass(frozen=True)
class Grad(_Reverse):
    """Differentiate: the jaxpr of grad(f), for f whose result is one number."""

    name: ClassVar[str] = "grad"
    transform: ClassVar[Callable[..., Any]] = jax.grad
    scalar: ClassVar[bool] = True


@dataclass(frozen=True)
class ValueAndGrad(_Reverse):
    """Give the result and the gradient: the jaxpr of value_and_grad(f)."""

    name: ClassVar[str] = "value_and_grad"
    transform: ClassVar[Callable[..., Any]] = jax.value_and_grad
    scalar: ClassVar[bool] = True


@dataclass(frozen=True)
class Jacrev(_Reverse):
    """The jacobian, row by row in reverse mode: the jaxpr of jacrev(f)."""

    name: ClassVar[str] = "jacrev"
    transform: ClassVar[Callable[..., Any]] = jax.jacrev


@dataclass(frozen=True)
class _Forward(Pass):
    """What the derivatives in forward mode have in common."""

    #: The positional arguments to differentiate by.
    argnums: Argnums = 0

    #: Whether the result is a pair, of what is differentiated and of what is handed on.
    has_aux: bool = False

    #: Whether the function is holomorphic; its arguments and results must then be complex.
    holomorphic: bool = False

    preserves: ClassVar[bool] = False
    transform: ClassVar[Callable[..., Any]]

    def __call__(self, program: Program) -> Program:
        """Raises ArgumentsError and UnsupportedError where JAX would raise an error."""
        leaves = _differentiated(program, self.name, self.argnums)
        _check_forward_arguments(program, leaves, self.name, self.holomorphic)
        outs = main_results(program, self.name, self.has_aux)
        if self.holomorphic:
            _check_complex(program.out_names, program.out_avals, outs, self.name, "result")
        options = {name: getattr(self, name) for name in ("argnums", "has_aux", "holomorphic")}
        return retraced(program, self.name, type(self).transform(function_of(program), **options))


@dataclass(frozen=True)
class Jacfwd(_Forward):
    """The jacobian, column by column in forward mode: the jaxpr of jacfwd(f)."""

    name: ClassVar[str] = "jacfwd"
    transform: ClassVar[Callable[..., Any]] = jax.jacfwd


@dataclass(frozen=True)
class Hessian(_Forward):
    """The second derivatives, forward over reverse: the jaxpr of hessian(f)."""

    name: ClassVar[str] = "hessian"
    transform: ClassVar[Callable[..., Any]] = jax.hessian


@dataclass(frozen=True)
class Jvp(Pass):
    """Push tangents forward: from (primals, tangents) to the results and their tangents."""

    name: ClassVar[str] = "jvp"
    preserves: ClassVar[bool] = False

    #: Whether the result is a pair, of what is differentiated and of what is handed on.
    has_aux: bool = False

    def __call__(self, program: Program) -> Program:
        """Takes keyword arguments as the program does. Raises UnsupportedError; see `retraced`."""
        outs = main_results(program, self.name, self.has_aux)
        fun = function_of(program)

        def jvp(primals: Any, tangents: Any, **kwargs: Any) -> Any:
            return jax.jvp(
                lambda *args: fun(*args, **kwargs), primals, tangents, has_aux=self.has_aux
            )

        args, kwargs = program.in_tree.children()
        count = args.num_leaves
        avals, names = program.in_avals, program.arg_names
        tangents = [aval.to_tangent_aval() for aval in avals[:count]]
        tangent_names = [f"d_{name}" for name in names[:count]]
        numbers = list(range(len(avals) + count))
        primals_tree = jax.tree.unflatten(args, numbers[:count])
        tangents_tree = jax.tree.unflatten(args, numbers[count : 2 * count])
        keywords = jax.tree.unflatten(kwargs, numbers[2 * count :])
        results = [program.out_names[i] for i in outs]
        others = program.out_names[len(outs) :]
        return retraced(
            program,
            self.name,
            jvp,
            in_tree=jax.tree.structure(((primals_tree, tangents_tree), keywords)),
            avals=[*avals[:count], *tangents, *avals[count:]],
            arg_names=[*names[:count], *tangent_names, *names[count:]],
            out_names=[*results, *(f"d_{name}" for name in results), *others],
        )


# --- checks ---------------------------------------------------------------------------------------


def _differentiated(program: Program, transform: str, argnums: Argnums) -> list[int]:
    """The flat arguments that are differentiated by."""
    groups = positional(program)
    return [i for n in chosen_argnums(program, transform, argnums) for i in groups[n]]


def _is(aval: Any, kind: Any) -> bool:
    return jnp.issubdtype(aval.dtype, kind)


def _check_reverse_arguments(
    program: Program, leaves: Sequence[int], transform: str, holomorphic: bool, allow_int: bool
) -> None:
    names, avals = program.arg_names, program.in_avals
    if holomorphic:
        _check_complex(names, avals, leaves, transform, "argument")
        return
    for i in leaves:
        if not (_is(avals[i], jnp.inexact) or allow_int):
            raise ArgumentsError(
                f"{transform} differentiates by real or complex arguments, and {names[i]} is "
                f"{type_of(avals[i])}",
                "allow_int=True gives integers a derivative of dtype float0",
            )


def _check_forward_arguments(
    program: Program, leaves: Sequence[int], transform: str, holomorphic: bool
) -> None:
    names, avals = program.arg_names, program.in_avals
    if holomorphic:
        _check_complex(names, avals, leaves, transform, "argument")
        return
    for i in leaves:
        if not _is(avals[i], jnp.floating):
            hint = "holomorphic=True" if _is(avals[i], jnp.complexfloating) else None
            raise ArgumentsError(
                f"{transform} differentiates by real arguments, and {names[i]} is "
                f"{type_of(avals[i])}",
                f"of a holomorphic function, say so: {hint}" if hint else None,
            )


def _check_complex(
    names: Sequence[str], avals: Sequence[Any], leaves: Sequence[int], transform: str, what: str
) -> None:
    for i in leaves:
        if not _is(avals[i], jnp.complexfloating):
            raise ArgumentsError(
                f"{transform}: with holomorphic=True every {what} must be complex, and {names[i]} "
                f"is {type_of(avals[i])}"
            )


def _check_scalar(program: Program, outs: Sequence[int], transform: str, has_aux: bool) -> None:
    tree = program.out_tree.children()[0] if has_aux else program.out_tree
    hint = None if has_aux else "with has_aux=True all but the first of a pair is handed on"
    if tree.node_data() is not None or len(outs) != 1:
        raise UnsupportedError(
            f"{transform} is defined for one number as a result, and {program.name} gives {tree}",
            hint,
        )
    if program.out_avals[0].shape != ():
        raise UnsupportedError(
            f"{transform} is defined for one number as a result, and {program.name} gives "
            f"{type_of(program.out_avals[0])}",
            "of an array, jacrev or jacfwd gives the jacobian",
        )


def _check_reverse_results(
    program: Program, outs: Sequence[int], transform: str, holomorphic: bool
) -> None:
    names, avals = program.out_names, program.out_avals
    if holomorphic:
        _check_complex(names, avals, outs, transform, "result")
        return
    for i in outs:
        if not _is(avals[i], jnp.floating):
            other = "; of a holomorphic function, say holomorphic=True"
            raise UnsupportedError(
                f"{transform} differentiates real results, and {names[i]} is {type_of(avals[i])}",
                "`vjp` takes any" + (other if _is(avals[i], jnp.complexfloating) else ""),
            )
