"""grad, value_and_grad, jacfwd, jacrev, hessian and jvp as passes, with JAX's options.

    trace(loss, params, x).apply("grad")           # jax.grad(loss), of the same arguments
    trace(loss, params, x).apply("jvp")            # ((primals), (tangents)) -> (result, tangent)

`argnums` counts the program's positional arguments; keyword arguments are not differentiated.
Arguments that JAX would refuse are refused before tracing, in terms of the program's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import filled, structure
from jaxprtool.jaxcompat import Aval
from jaxprtool.passes import Pass
from jaxprtool.passes.retrace import (
    WithAux,
    as_pair,
    chosen_argnums,
    differentiable_function_of,
    main_results,
    positional,
    retraced,
)

#: A transformation of JAX.
Transform = Callable[..., Callable[..., Any]]

#: Values by name.
Named = Sequence[tuple[str, Aval]]


@dataclass(frozen=True)
class _Derivative(Pass):
    """The common options and checks of derivatives with respect to arguments.

    Args:
        argnums: The positional arguments to differentiate with respect to.
        has_aux: The result is a pair of the output to differentiate and auxiliary data.
        holomorphic: The function is holomorphic; its arguments and results must be complex.

    Raises:
        ArgumentsError: If `argnums` contains a position without an argument, or one twice, or the
            position of an argument that is not real (with `holomorphic`, not complex).
    """

    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    holomorphic: bool = False

    preserves: ClassVar[bool] = False
    transform: ClassVar[Transform]

    def __call__(self, program: Program) -> Program:
        """Return the derivative.

        Raises ArgumentsError and UnsupportedError where JAX would raise an error.
        """
        groups, numbers = positional(program), chosen_argnums(program, self.name, self.argnums)
        arguments = [
            (program.arg_names[i], program.in_avals[i]) for n in numbers for i in groups[n]
        ]
        program = as_pair(program)
        outs = main_results(program, self.name, self.has_aux)
        results = [(program.out_names[i], program.out_avals[i]) for i in outs]
        self._check_scalar(program, results)
        if self.holomorphic:
            self._check_complex("argument", arguments)
            self._check_complex("result", results)
        else:
            self._check_real(arguments, results)
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        fun = differentiable_function_of(program)
        return retraced(program, self.name, type(self).transform(fun, **options))

    def _check_complex(self, what: str, values: Named) -> None:
        for name, aval in _others(values, jnp.complexfloating):
            raise ArgumentsError(
                f"{self.name}: with holomorphic=True every {what} must be complex, but {name} is "
                f"{type_of(aval)}"
            )

    def _check_real(self, arguments: Named, results: Named) -> None:
        """Check the types of a function that is not holomorphic."""

    def _check_scalar(self, program: Program, results: Named) -> None:
        """Check that the result is one number, if the derivative requires it."""


@dataclass(frozen=True)
class _ReverseMode(_Derivative):
    """The common options of derivatives in reverse mode.

    Args:
        allow_int: Also differentiate with respect to integers; their derivatives have dtype float0.
    """

    allow_int: bool = False

    def _check_real(self, arguments: Named, results: Named) -> None:
        for name, aval in () if self.allow_int else _others(arguments, jnp.inexact):
            raise ArgumentsError(
                f"{self.name} needs real or complex arguments to differentiate, but {name} is "
                f"{type_of(aval)}",
                "allow_int=True gives integers a derivative of dtype float0",
            )
        for name, aval in _others(results, jnp.floating):
            other = (
                "; for a holomorphic function, set holomorphic=True" if _is_complex(aval) else ""
            )
            raise UnsupportedError(
                f"{self.name} needs real results, but {name} is {type_of(aval)}",
                f"use `vjp` for other results{other}",
            )


@dataclass(frozen=True)
class _ScalarDerivative(_ReverseMode):
    """The common check of derivatives of a scalar.

    Raises:
        UnsupportedError: If the result is not a scalar. Use `jacrev` or `jacfwd` for the jacobian
            of an array.
    """

    def _check_scalar(self, program: Program, results: Named) -> None:
        tree = program.out_tree.children()[0] if self.has_aux else program.out_tree
        says = f"{self.name} needs a result that is one number, but {program.name} returns"
        if tree.node_data() is not None or len(results) != 1:
            hint = (
                None
                if self.has_aux
                else "with has_aux=True, only the first of a pair of results is differentiated"
            )
            types = str(filled(tree, [type_of(aval) for _, aval in results]))
            types = types if len(types) <= 200 else f"{len(results)} arrays"
            raise UnsupportedError(f"{says} {types}".replace("'", ""), hint)
        if results[0][1].shape != ():
            raise UnsupportedError(
                f"{says} {type_of(results[0][1])}",
                "use jacrev or jacfwd for the jacobian of an array",
            )


@dataclass(frozen=True)
class Grad(_ScalarDerivative):
    """Differentiate a scalar function: the jaxpr of grad(f).

    Uses reverse mode, as `jax.grad` does. Run `-O1` afterwards to remove dead code.

    Example:
        def f(x):
            return jnp.sin(x) * 2

        $ jaxprtool opt f.py:f --args "f32[]" -p "grad, -O1"
        { lambda ; a:f32[]. let b:f32[] = cos a; c:f32[] = mul 2.0:f32[] b in (c,) }
    """

    name: ClassVar[str] = "grad"
    group: ClassVar[str] = "transform"
    transform: ClassVar[Transform] = jax.grad


@dataclass(frozen=True)
class ValueAndGrad(_ScalarDerivative):
    """Compute the result and its gradient: the jaxpr of value_and_grad(f).

    Uses reverse mode, as `jax.value_and_grad` does.

    Example:
        def f(x):
            return jnp.sin(x) * 2

        $ jaxprtool opt f.py:f --args "f32[]" -p "value_and_grad, -O1"
        { lambda ; a:f32[]. let
            b:f32[] = sin a
            c:f32[] = cos a
            d:f32[] = mul b 2.0:f32[]
            e:f32[] = mul 2.0:f32[] c
          in (d, e) }
    """

    name: ClassVar[str] = "value_and_grad"
    group: ClassVar[str] = "transform"
    transform: ClassVar[Transform] = jax.value_and_grad


@dataclass(frozen=True)
class Jacrev(_ReverseMode):
    """Compute the jacobian row by row, in reverse mode: the jaxpr of jacrev(f).

    Use it if the results have fewer elements than the arguments, and `jacfwd` if they have more.

    Example:
        $ jaxprtool opt model.py:residual -p "jacrev(argnums=1), -O1"
    """

    name: ClassVar[str] = "jacrev"
    group: ClassVar[str] = "transform"
    transform: ClassVar[Transform] = jax.jacrev


@dataclass(frozen=True)
class _ForwardMode(_Derivative):
    """The common check of derivatives in forward mode.

    Raises:
        UnsupportedError: If the function calls one with a `custom_vjp`, which has no forward
            mode.
    """

    def _check_real(self, arguments: Named, results: Named) -> None:
        for name, aval in _others(arguments, jnp.floating):
            raise ArgumentsError(
                f"{self.name} needs real arguments to differentiate, but {name} is {type_of(aval)}",
                "for a holomorphic function, set holomorphic=True" if _is_complex(aval) else None,
            )


@dataclass(frozen=True)
class Jacfwd(_ForwardMode):
    """Compute the jacobian column by column, in forward mode: the jaxpr of jacfwd(f).

    Use it if the results have more elements than the arguments, and `jacrev` if they have fewer.

    Example:
        $ jaxprtool opt model.py:residual -p "jacfwd(argnums=1), -O1"
    """

    name: ClassVar[str] = "jacfwd"
    group: ClassVar[str] = "transform"
    transform: ClassVar[Transform] = jax.jacfwd


@dataclass(frozen=True)
class Hessian(_ForwardMode):
    """Compute second derivatives, forward over reverse: the jaxpr of hessian(f).

    Example:
        $ jaxprtool opt model.py:loss -p "hessian, -O1"
    """

    name: ClassVar[str] = "hessian"
    group: ClassVar[str] = "transform"
    transform: ClassVar[Transform] = jax.hessian


@dataclass(frozen=True)
class Jvp(WithAux):
    """Push tangents forward: map (primals, tangents) to the results and their tangents.

    Uses forward mode, as `jax.jvp` does. The program takes two tuples: the arguments and their
    tangents.

    Raises:
        UnsupportedError: If the function calls one with a `custom_vjp`, which has no forward
            mode.

    Example:
        def f(x):
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p jvp
        { lambda ; a:f32[3] b:f32[3]. let
            c:f32[3] = sin a
            d:f32[3] = cos a
            e:f32[3] = mul b d
          in (c, e) }
    """

    name: ClassVar[str] = "jvp"
    group: ClassVar[str] = "transform"

    def __call__(self, program: Program) -> Program:
        """Return the program of primals and tangents. Raises UnsupportedError; see `retraced`.

        It takes keyword arguments as the program does.
        """
        program = as_pair(program)
        outs = main_results(program, self.name, self.has_aux)
        fun = differentiable_function_of(program)

        def jvp(primals: object, tangents: object, **kwargs: object) -> object:
            return jax.jvp(
                lambda *args: fun(*args, **kwargs), primals, tangents, has_aux=self.has_aux
            )

        args, kwargs = filled(program.in_tree, range(len(program.in_avals)))
        count = len(jax.tree.leaves(args))
        avals, names = program.in_avals, program.arg_names
        tangents = [aval.to_tangent_aval() for aval in avals[:count]]
        results = [program.out_names[i] for i in outs]
        others = program.out_names[len(outs) :]
        return retraced(
            program,
            self.name,
            jvp,
            in_tree=structure(((args, args), kwargs)),
            avals=[*avals[:count], *tangents, *avals[count:]],
            arg_names=[*names[:count], *(f"d_{name}" for name in names[:count]), *names[count:]],
            out_names=[*results, *(f"d_{name}" for name in results), *others],
        )


def _others(values: Named, scalar_type: type) -> Iterable[tuple[str, Aval]]:
    """Return the values whose dtypes are not of a kind."""
    return ((name, aval) for name, aval in values if not jnp.issubdtype(aval.dtype, scalar_type))


def _is_complex(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)
