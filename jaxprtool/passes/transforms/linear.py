"""vjp, linearize and linear_transpose as passes.

    parts = trace(loss, params, x).apply("vjp")    # or "linearize"
    result, residuals = parts["forward"](params, x)
    grads = parts["backward"](residuals, 1.0)      # linearize: backward(residuals, (d_params, d_x))

`forward` returns the results and the values that `backward` needs, the residuals: a dict by the
source line and the primitive that computed each, `model.py:12 tanh`. A value named with
`checkpoint_name` has that name, and an argument its own. Constants of the program are constants of
`backward` too, and values that it would not read are not residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir import source_text
from jaxprtool.ir.dataflow import DefiningEquations
from jaxprtool.ir.dtypes import is_float0
from jaxprtool.ir.equations import bodies, equations, free_variables, named, type_of
from jaxprtool.ir.frames import own_frame, short_paths
from jaxprtool.ir.program import Program, Programs, top_jaxpr
from jaxprtool.ir.regions import Call, keep, view
from jaxprtool.ir.rewrite import Memo
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled, paths, structure, unique
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass
from jaxprtool.passes.retrace import (
    WithAux,
    as_pair,
    chosen_argnums,
    differentiable_function_of,
    function_of,
    main_results,
    positional,
    retraced,
    with_names,
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Vjp(WithAux):
    """Split into `forward`, which also returns residuals, and `backward`, for cotangents.

    `forward` returns the results and the residuals, the values that `backward` needs. The residuals
    are a dict whose keys are the source line and primitive that computed each, or the name given by
    `checkpoint_name`. `backward` takes the residuals and the cotangents of the results, and returns
    those of the arguments.

    Args:
        argnums: The positional arguments to differentiate with respect to; by default all.

    Raises:
        ArgumentsError: If `argnums` contains a position without an argument, or one twice.

    Example:
        def f(x):
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p vjp
        # forward
        { lambda ; a:f32[3]. let b:f32[3] = sin a; c:f32[3] = cos a in (b, c) }

        # backward
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = mul b a in (c,) }
    """

    name: ClassVar[str] = "vjp"
    group: ClassVar[str] = "split"

    argnums: int | tuple[int, ...] | None = None

    def __call__(self, program: Program) -> Programs:
        """Return `forward`, and `backward`, which takes (residuals, cotangents).

        `backward` returns a tuple of cotangents, one for each argument in `argnums`, or a single
        one if `argnums` is a number. Raises ArgumentsError, and UnsupportedError as `retraced`
        does.
        """
        program = as_pair(program)
        at = tuple(range(len(positional(program))))
        if self.argnums is not None:
            at = chosen_argnums(program, self.name, self.argnums)
        count = len(main_results(program, self.name, self.has_aux))
        tree = program.out_tree.children()[0] if self.has_aux else program.out_tree
        example = filled(tree, range(count))
        avals = [aval.to_ct_aval() for aval in program.out_avals[:count]]
        arguments = _BackwardArguments((example,), avals, paths("cotangents", example))

        def vjp(fun: Function, *primals: object, has_aux: bool) -> tuple[object, ...]:
            def moving(*args: object) -> object:
                return fun(*(dict(enumerate(primals)) | dict(zip(at, args, strict=True))).values())

            out, pulled, *aux = jax.vjp(moving, *(primals[n] for n in at), has_aux=has_aux)
            if isinstance(self.argnums, int):
                pulled = jax.tree_util.Partial(_first, pulled)
            return out, pulled, *aux

        return _forward_and_backward(program, self.name, vjp, self.has_aux, arguments)


def _first(function: Function, *args: object) -> object:
    return function(*args)[0]


@dataclass(frozen=True)
class Linearize(WithAux):
    """Split into `forward`, which also returns residuals, and `backward`, for tangents.

    `forward` returns the results and the residuals, named by the source lines that computed them.
    `backward` takes the residuals and the tangents of the arguments, and returns those of the
    results.

    Example:
        def f(x):
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p linearize
        # forward
        { lambda ; a:f32[3]. let b:f32[3] = sin a; c:f32[3] = cos a in (b, c) }

        # backward
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = mul b a in (c,) }
    """

    name: ClassVar[str] = "linearize"
    group: ClassVar[str] = "split"

    def __call__(self, program: Program) -> Programs:
        """Return `forward`, and `backward`, the linear function that `jax.linearize` returns.

        `backward` takes (residuals, tangents), with a tuple of tangents, one for each positional
        argument, and returns those of the results. Raises as `Vjp` does.
        """
        program = as_pair(program)
        main_results(program, self.name, self.has_aux)
        tree = program.in_tree.children()[0]
        count = tree.num_leaves
        avals = [aval.to_tangent_aval() for aval in program.in_avals[:count]]
        names = [f"d_{name}" for name in program.arg_names[:count]]
        arguments = _BackwardArguments((filled(tree, range(count)),), avals, names)

        def linearize(fun: Function, *primals: object, has_aux: bool) -> tuple[object, ...]:
            out, pushed, *aux = jax.linearize(fun, *primals, has_aux=has_aux)
            spread = jax.tree_util.Partial(_spread, pushed)
            return out, spread, *aux

        return _forward_and_backward(program, self.name, linearize, self.has_aux, arguments)


def _spread(function: Function, args: Sequence[object]) -> object:
    return function(*args)


# --- transpose ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearTranspose(Pass):
    """Transpose a linear function: map cotangents of its results to those of its arguments.

    `linearize, backward.linear_transpose(argnums=1)` is `vjp`.

    Args:
        argnums: The positional arguments in which the function is linear; by default all.

    Raises:
        ArgumentsError: If some of these arguments are integers and others are not.
        UnsupportedError: If the function is not linear in them, or JAX's transpose of an
            equation would lose the cotangents of integers.

    Example:
        def f(x):
            return (2 * x).sum()

        $ jaxprtool opt f.py:f --args "f32[3]" -p linear_transpose
        { lambda ; a:f32[]. let
            b:f32[3] = broadcast_in_dim a
            c:f32[3] = mul 2.0:f32[] b
          in (c,) }
    """

    name: ClassVar[str] = "linear_transpose"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    argnums: int | tuple[int, ...] | None = None

    def __call__(self, program: Program) -> Program:
        """Return the transposed program.

        It takes the other positional arguments, then the cotangents, of the tree of the results,
        and keyword arguments as the program does. It returns a tuple of cotangents, one for each
        argument in `argnums`, or a single one if `argnums` is a number.

        Raises ArgumentsError for arguments that cannot be transposed, and UnsupportedError, which
        names the line, for a program that is not linear in them.
        """
        count, avals, names = len(positional(program)), program.in_avals, program.arg_names
        numbers = range(count) if self.argnums is None else self.argnums
        at = chosen_argnums(program, self.name, numbers)
        args, kwargs = filled(program.in_tree, range(len(avals)))
        moving = [args[n] for n in at]
        others = [n for n in range(count) if n not in at]
        _check_moving(program, jax.tree.leaves(moving))
        primals = jax.tree.map(lambda i: avals[i], moving)
        fun = function_of(program)

        def transpose(*args: Any, **kwargs: object) -> object:
            *rest, cotangents = args
            fixed = dict(zip(others, rest, strict=True))

            def linear(values: Sequence[object]) -> object:
                by_position = fixed | dict(zip(at, values, strict=True))
                return fun(*(by_position[n] for n in range(count)), **kwargs)

            pulled = _transposed(linear, primals, cotangents)
            return pulled[0] if isinstance(self.argnums, int) else tuple(pulled)

        rest = [args[n] for n in others]
        results = filled(program.out_tree, range(len(program.out_avals)))
        before, after = jax.tree.leaves(rest), jax.tree.leaves(kwargs)
        has_argnums = self.argnums is not None
        which = (
            "the arguments of argnums" if has_argnums else "all arguments, or in those of argnums"
        )
        return retraced(
            program,
            self.name,
            transpose,
            in_tree=structure(((*rest, results), kwargs)),
            avals=[*(avals[i] for i in before), *program.out_avals, *(avals[i] for i in after)],
            arg_names=[
                *(names[i] for i in before),
                *paths("cotangents", results),
                *(names[i] for i in after),
            ],
            hint=f"it must be linear in {which}; `vjp` takes any program",
        )


def _transposed(fun: Function, primals: object, cotangents: object) -> Any:
    """Return the result of `jax.linear_transpose`, on JAX 0.10 also for values of dtype float0.

    A float0 value is determined by its shape, so these are omitted and filled in again.
    """
    leaves, tree = jax.tree.flatten(primals)
    zeros = [np.zeros(x.shape, x.dtype) if is_float0(x) else None for x in leaves]

    def whole(values: Sequence[object]) -> object:
        leaves = iter(values)
        return jax.tree.unflatten(tree, [next(leaves) if x is None else x for x in zeros])

    def without(values: Sequence[object]) -> list[object]:
        return [x for x in values if not is_float0(x)]

    def linear(*values: object) -> list[object]:
        return without(jax.tree.leaves(fun(whole(values))))

    transpose = jax.linear_transpose(linear, *without(leaves))
    return whole(transpose(without(jax.tree.leaves(cotangents))))


def _check_moving(program: Program, leaves: Sequence[int]) -> None:
    """Refuse types that JAX does not transpose: all must be inexact, or all integers."""
    arguments = [(program.arg_names[i], program.in_avals[i]) for i in leaves]
    values = [*arguments, *zip(program.out_names, program.out_avals, strict=True)]
    seen: dict[bool, str] = {}
    for name, aval in values:
        if is_float0(aval):
            continue
        shown = f"{name} is {type_of(aval)}"
        if not jnp.issubdtype(aval.dtype, jnp.number):
            raise ArgumentsError(
                f"linear_transpose needs values that are numbers, but {shown}", _ARGNUMS_HINT
            )
        seen.setdefault(jnp.issubdtype(aval.dtype, jnp.integer), shown)
    if len(seen) == 2:
        raise ArgumentsError(
            f"linear_transpose does not mix integers with other numbers, but {seen[True]} and "
            f"{seen[False]}",
            _ARGNUMS_HINT,
        )
    if True in seen:
        _check_integers(program, leaves)


_ARGNUMS_HINT = "argnums names the arguments in which a function is linear"


def _check_integers(program: Program, leaves: Sequence[int]) -> None:
    """Refuse a program in which JAX's transpose would silently lose cotangents."""
    loss = _first_loss(top_jaxpr(program), frozenset(leaves), Memo())
    if loss is None:
        return
    inner, outer = loss
    where = named(inner) if inner is outer else f"{inner.primitive.name} in {named(outer)}"
    hint = None
    if inner.primitive.name == "convert_element_type":
        hint = "JAX converts an argument of type i32[] differently from a Python number"
    raise UnsupportedError(
        f"linear_transpose of {program.name}: JAX's transpose of {where} loses the cotangents of "
        "integers",
        hint,
    )


def _first_loss(
    jaxpr: Jaxpr, leaves: frozenset[int], memo: Memo
) -> tuple[JaxprEqn, JaxprEqn] | None:
    """Return the first equation that loses cotangents of these arguments, and its holder."""
    moving = {jaxpr.invars[i] for i in leaves}
    for eqn in jaxpr.eqns:
        moves = [isinstance(v, Var) and v in moving for v in eqn.invars]
        if True not in moves:
            continue
        moving.update(eqn.outvars)
        if isinstance(view(eqn), Call):
            ((_, body),) = bodies(eqn)
            moved = frozenset(i for i, moves_it in enumerate(moves) if moves_it)
            loss = memo(partial(_first_loss, body, moved, memo), body, moved)
            inside = [] if loss is None else [loss[0]]
        else:  # any equation in a loop or a branch may depend on them
            inside = [inner for _, body in bodies(eqn) for inner in equations(body)]
        for inner in (eqn, *inside):
            if not traits(inner).transposes_integers:
                return inner, eqn
    return None


# --- forward and backward -------------------------------------------------------------------------


@dataclass(frozen=True)
class _BackwardArguments:
    """The arguments of `backward` after the residuals: an example, their types and names."""

    example: tuple[object, ...]
    avals: Sequence[Aval]
    names: Sequence[str]


def _forward_and_backward(
    program: Program, transform: str, split: Function, has_aux: bool, arguments: _BackwardArguments
) -> Programs:
    """Return forward and backward.

    `split`, a function of JAX, returns the results and a linear function: a pytree, whose leaves
    are the residuals.
    """
    fun = differentiable_function_of(program)
    trees: list[PyTreeDef] = []

    def both(*args: object, **kwargs: object) -> object:
        out, linear, *aux = split(lambda *args: fun(*args, **kwargs), *args, has_aux=has_aux)
        leaves, tree = jax.tree.flatten(linear)
        trees.append(tree)
        return (out, *aux), leaves

    whole = retraced(program, transform, both)
    count = whole.out_tree.children()[0].num_leaves
    residual_atoms = whole.jaxpr.outvars[count:]
    constants = dict(zip(whole.jaxpr.constvars, whole.jaxpr.consts, strict=True))
    needed = [v for v in residual_atoms if isinstance(v, Var) and v not in constants]
    named = residual_names(list(dict.fromkeys(needed)), whole.jaxpr, whole.arg_names)

    def backward(residuals: dict[str, object], *args: object) -> object:
        values = {**constants, **{var: residuals[name] for var, name in named.items()}}
        leaves = [v.val if isinstance(v, Literal) else values[v] for v in residual_atoms]
        return jax.tree.unflatten(trees[0], leaves)(*args)

    by_name = dict(sorted((name, var) for var, name in named.items()))
    late = retraced(
        program,
        transform,
        backward,
        in_tree=structure(((dict.fromkeys(by_name, 0), *arguments.example), {})),
        avals=[*(var.aval for var in by_name.values()), *arguments.avals],
        arg_names=[*(f"residuals[{name!r}]" for name in by_name), *arguments.names],
    )
    read = free_variables(late.jaxpr.eqns, late.jaxpr.outvars)
    kept = [v in read for v in late.jaxpr.invars[: len(by_name)]]
    residuals = dict(keep(list(by_name.items()), kept))
    forward = _forward(program.name, whole, residuals, count)
    return Programs({"forward": forward, "backward": _backward(late, kept, residuals, arguments)})


def _forward(name: str, whole: Program, residuals: Mapping[str, Var], count: int) -> Program:
    """Return the program of (results, residuals), and aux; results and aux have `count` leaves."""
    (main, *aux), _ = filled(whole.out_tree, range(len(whole.out_avals)))
    result = (main, dict.fromkeys(residuals, 0), *aux)
    outs = whole.jaxpr.outvars[:count]
    first = len(jax.tree.leaves(main))
    outvars = [*outs[:first], *residuals.values(), *outs[first:]]
    jaxpr = jaxcompat.replace_jaxpr(whole.jaxpr, outvars=outvars)
    name, out_names = f"{name}_forward", paths("result", result)
    return whole.replace(
        name=name,
        jaxpr=with_names(jaxpr, name, whole.arg_names, out_names),
        out_tree=structure(result),
        out_names=out_names,
    )


def _backward(
    late: Program, kept: Sequence[bool], residuals: Mapping[str, Var], arguments: _BackwardArguments
) -> Program:
    """Return the linear half, which only takes the residuals that it reads."""
    flags = [*kept, *(True for _ in arguments.avals)]
    jaxpr, arg_names = late.jaxpr, keep(late.arg_names, flags)
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, invars=keep(jaxpr.invars, flags))
    name = f"{late.name}_backward"
    return late.replace(
        name=name,
        jaxpr=with_names(jaxpr, name, arg_names, late.out_names),
        in_tree=structure(((dict.fromkeys(residuals, 0), *arguments.example), {})),
        arg_names=arg_names,
    )


# --- residuals ------------------------------------------------------------------------------------
# The names of residuals: the source locations where they are computed.


def residual_names(
    values: Sequence[Var], jaxpr: ClosedJaxpr, arg_names: Sequence[str]
) -> dict[Var, str]:
    """Return a unique name for each variable of a closed jaxpr that is not a constant.

    An argument has its own name; a value named with `checkpoint_name` has that one; others have the
    file, line and primitive that computed them, `model.py:12 tanh`, with as many folders as are
    needed to distinguish files.
    """
    arguments = dict(zip(jaxpr.invars, arg_names, strict=True))
    computed = DefiningEquations(jaxpr)
    origins = [_origin(value, computed, arguments) for value in values]
    locations = short_paths([origin.location for origin in origins])
    names = [
        f"{location} {origin.name}".strip()
        for location, origin in zip(locations, origins, strict=True)
    ]
    return dict(zip(values, unique(names), strict=True))


class _ValueOrigin(NamedTuple):
    """The name of a value, and its source location with the full path; "" if not used."""

    name: str
    location: str = ""


def _origin(value: Var, computed: DefiningEquations, arguments: Mapping[Var, str]) -> _ValueOrigin:
    locations = [""]
    while value not in arguments:
        eqn, around, operand = computed.of(value)
        locations += [location for e in (*around, eqn) if (location := _location(e))]
        if not isinstance(operand, Var):
            if eqn.primitive.name == "name":
                return _ValueOrigin(str(eqn.params["name"]))
            return _ValueOrigin(str(eqn.primitive.name), locations[-1])
        value = operand
    return _ValueOrigin(arguments[value])


def _location(eqn: JaxprEqn) -> str:
    frame = own_frame(eqn)
    return f"{source_text.path(frame.file)}:{frame.line}" if frame else ""
