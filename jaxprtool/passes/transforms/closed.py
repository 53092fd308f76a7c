"""closed and open_constants: arguments become constants, and constants an argument.

    program.apply("closed({0: 3.0, 'training': False})")
    program.apply(Closed({"params": params}))

A key is the position of an argument, or a path as in `Program.arg_names`: of one flat value,
`params['w']`, or of a larger part of the arguments, `params`, which takes a value of the same tree.
The end of a path is enough if only one path has it: `w`.
A number represents a scalar, and nested lists represent an array. An argument that is bound as a
whole is removed, as from a `functools.partial`; a bound part of one becomes None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError, did_you_mean
from jaxprtool.ir.arguments import Mismatch, matched_leaves
from jaxprtool.ir.custom_rules import custom_rule, has_rule, rule_jaxprs, rules_followed
from jaxprtool.ir.documents import listed
from jaxprtool.ir.equations import equations, size_of, substitute, type_of, with_operands
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.regions import keep, open_regions, sub_jaxprs
from jaxprtool.ir.rewrite import Memo, Taken, pass_constants
from jaxprtool.ir.symbols import LengthsBound
from jaxprtool.ir.trees import filled, named_by_end, paths, structure, unique
from jaxprtool.jaxcompat import AnyJaxpr, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.framework.retrace import chosen, positional, with_names

# --- closed ---------------------------------------------------------------------------------------
# closed: bind some of a program's arguments to values, which become constants.

#: The maximum number of names that an error lists.
_SHOWN = 5


@dataclass(frozen=True)
class Closed(Pass):
    """Bind arguments to values, by position or name; the values become constants.

    An argument that is bound as a whole is removed, as from a `functools.partial`; a bound part of
    an argument becomes None.

    Args:
        args: The values by position, or by the path of an argument or of a part of one: `{0: 3.0,
            'params': …}`. A number represents a scalar, and nested lists represent an array.

    Raises:
        ArgumentsError: If there is no argument at a position or with a name, an argument is bound
            twice, or a value does not fit its type.

    Example:
        def f(x, scale):
            return x * scale

        $ jaxprtool opt f.py:f --args "f32[3], f32[]" -p "closed({'scale': 2.0})"
        { lambda ; a:f32[3]. let b:f32[3] = mul a 2.0:f32[] in (b,) }
    """

    name: ClassVar[str] = "closed"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    args: dict[int | str, Any]

    def __call__(self, program: Program) -> Program:
        """Return the program with the arguments bound.

        Raises ArgumentsError for an unknown argument, or a value that does not fit.
        """
        values: dict[int, Any] = {}
        for key, value in self.args.items():
            for i, leaf in _leaves(program, key, value):
                name = program.arg_names[i]
                if i in values:
                    raise ArgumentsError(f"closed: argument {name} is bound twice")
                _require_rows(program, name)
                values[i] = program.bounded(i, _of_type(name, leaf, program.in_avals[i]))
        return _bound(program, values) if values else program


def _bound(program: Program, values: dict[int, Any]) -> Program:
    """Return the program with flat arguments bound: scalars as literals, others as constants."""
    jaxpr = program.jaxpr
    literals: dict[Var, Literal] = {}
    constvars, consts = list(jaxpr.constvars), list(jaxpr.consts)
    for i, value in values.items():
        var = jaxpr.invars[i]
        if (literal := jaxcompat.as_literal(value, var.aval)) is not None:
            literals[var] = literal
        else:
            constvars.append(var)
            consts.append(value)

    free = [i not in values for i in range(len(jaxpr.invars))]
    arg_names = keep(program.arg_names, free)
    new = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=constvars,
        consts=consts,
        invars=keep(jaxpr.invars, free),
        outvars=substitute(jaxpr.outvars, literals),
        eqns=[with_operands(eqn, literals) for eqn in jaxpr.eqns],
    )
    in_tree = structure(remaining(program, free))
    return program.replace(jaxpr=new, in_tree=in_tree, arg_names=arg_names)


def remaining(program: Program, free: Sequence[bool]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that remain, with flat indices as leaves.

    `free` marks the flat arguments that remain. An argument of which nothing remains is removed; a
    removed part of one is None.
    """
    before = filled(program.in_tree, range(len(free)))
    after = filled(program.in_tree, [i if flag else None for i, flag in enumerate(free)])

    def stays(had: object, has: object) -> bool:
        return bool(jax.tree.leaves(has)) or not jax.tree.leaves(had)

    args = tuple(has for had, has in zip(before[0], after[0], strict=True) if stays(had, has))
    kwargs = {name: has for name, has in after[1].items() if stays(before[1][name], has)}
    return args, kwargs


def _require_rows(program: Program, name: str) -> None:
    """Refuse to bind lengths that could then not be checked against the rows."""
    bound = dict(program.bounds).get(name)
    if isinstance(bound, LengthsBound) and not isinstance(bound.rows, int):
        raise ArgumentsError(
            f"closed: argument {name} is {bound}, and the number of rows is unknown",
            f"give it with specialize({bound.rows}=…)",
        )


# --- selection of arguments -----------------------------------------------------------------------


def _leaves(program: Program, key: int | str, value: object) -> list[tuple[int, Any]]:
    """Return the flat arguments that a key names, each with its part of the value."""
    if isinstance(key, str):
        leaves, tree = _named(program, key)
    elif isinstance(key, int) and not isinstance(key, bool):
        (number,) = chosen(program, "closed", "args", key)
        leaves = positional(program)[number]
        tree = program.in_tree.children()[0].children()[number]
    else:
        raise ArgumentsError(f"closed: {key!r} is neither the position nor the name of an argument")
    if tree == structure(0):
        return [(leaves[0], value)]  # nested lists are an array
    try:
        return list(zip(leaves, matched_leaves(tree, value, str(key)), strict=True))
    except Mismatch as mismatch:
        wanted = ", ".join(program.arg_names[i] for i in leaves)
        raise ArgumentsError(
            f"closed: the value of argument {key} does not fit: {mismatch}",
            f"its parts are: {wanted}" if wanted else None,
        ) from None


def _named(program: Program, key: str) -> tuple[list[int], PyTreeDef]:
    """Return the flat arguments whose path is, or begins with, `key`, and their tree."""
    names = program.arg_names
    if key in names:
        return [names.index(key)], structure(0)
    if not any(name.startswith((f"{key}[", f"{key}.")) for name in names):
        ends = named_by_end(names, key)
        if len(ends) > 1:
            raise ArgumentsError(
                f"closed: '{key}' is the end of {len(ends)} names: {listed(ends, _SHOWN)}",
                "write more of the path",
            )
        if ends:
            return _named(program, *ends)
    positions = [i for i, name in enumerate(names) if name.startswith((f"{key}[", f"{key}."))]
    if not positions:
        roots = dict.fromkeys([*names, *(name.split("[")[0] for name in names)])
        raise ArgumentsError(
            f"closed: {program.name} has no argument '{key}'",
            did_you_mean(key, roots) or f"its arguments are: {', '.join(names)}",
        )
    example = filled(program.in_tree, range(len(names)))
    key_paths = [key_path for key_path, _ in jax.tree.leaves_with_path(example)]
    first, suffix = positions[0], names[positions[0]][len(key) :]
    for depth in range(len(key_paths[first]) + 1):
        if jax.tree_util.keystr(key_paths[first][depth:]) == suffix:
            inside = [
                i
                for i, key_path in enumerate(key_paths)
                if key_path[:depth] == key_paths[first][:depth]
            ]
            if inside == positions:
                return positions, _subtree(program.in_tree, first, depth)
    raise ArgumentsError(
        f"closed: '{key}' is not a single part of the arguments of {program.name}",
        f"bind each by its own name: {', '.join(names[i] for i in positions)}",
    )


def _subtree(tree: PyTreeDef, leaf: int, depth: int) -> PyTreeDef:
    """Return the part of a structure that is `depth` steps down the path to a leaf."""
    for _ in range(depth):
        for child in tree.children():
            if leaf < child.num_leaves:
                tree = child
                break
            leaf -= child.num_leaves
    return tree


# --- values ---------------------------------------------------------------------------------------


def _of_type(name: str, value: Any, aval: Aval) -> Any:
    """Return a value as an array of an argument's type. Raises ArgumentsError for a misfit."""
    shown = type_of(aval)
    shape = getattr(aval, "shape", None)
    if isinstance(aval, jaxcompat.AbstractRef) or shape is None:
        raise ArgumentsError(f"closed: argument {name} is {shown}, which cannot be bound")
    if not all(isinstance(n, int) for n in shape):
        raise ArgumentsError(f"closed: argument {name} is {shown}, whose size is unknown")
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        if getattr(value, "dtype", None) != aval.dtype or value.shape != shape:
            raise ArgumentsError(
                f"closed: argument {name} is {shown}, but the value is not",
                "from Python, bind an array of keys: Closed({...: jax.random.key(0)})",
            )
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        raise ArgumentsError(f"closed: the value of argument {name} is not an array") from None
    if array.shape != shape:
        raise ArgumentsError(
            f"closed: argument {name} is {shown}, but the value has shape {array.shape}"
        )
    if not _holds(aval.dtype, array):
        raise ArgumentsError(f"closed: argument {name} is {shown}, which cannot hold {value!r}")
    return value if getattr(value, "dtype", None) == aval.dtype else array.astype(aval.dtype)


#: The kinds of numbers, each of which holds those before it.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _holds(dtype: np.dtype, value: np.ndarray) -> bool:
    """Return True if a dtype can represent values: the kind must fit, and integers their range."""

    def kind(of: np.dtype) -> int:
        return next((i for i, k in enumerate(_KINDS) if jnp.issubdtype(of, k)), len(_KINDS))

    if kind(value.dtype) > kind(dtype):
        return False
    if jnp.issubdtype(dtype, jnp.integer) and value.dtype != np.bool_:
        bounds = jnp.iinfo(dtype)
        return bool(np.all((value >= bounds.min) & (value <= bounds.max)))
    return True


# --- open constants -------------------------------------------------------------------------------
# open_constants: turn constants of a program into an argument, returned separately.
#
#     constants, apply = program.apply("open_constants").values()
#     apply(x, constants())           # program(x); other constants give other results
#
# Constants of the bodies of loops, branches and calls are passed in from outside. Values that a
# custom derivative closes over stay: JAX does not differentiate with respect to them, and the rule,
# a Python function, has its own.


@dataclass(frozen=True)
class OpenConstants(Pass):
    """Turn constants into an argument, as `jax.closure_convert` does; the inverse of `closed`.

    The result is two programs: `constants`, which takes no arguments and returns a list of the
    values, and `apply`, which takes such a list after the other positional arguments. Constants in
    the bodies of loops, branches and calls are included, each once.

    Args:
        min_bytes: The minimum size in bytes of a constant to turn into an argument.

    Note:
        Values that a function with a custom derivative closes over stay constants: JAX does not
        differentiate with respect to them, and the rule holds them itself.

    Example:
        table = jnp.arange(3.0)

        def f(x):
            return x * table

        $ jaxprtool opt f.py:f --args "f32[3]" -p open_constants
        # constants
        { lambda a:f32[3]; . let  in (a,) }

        # apply
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "open_constants"
    group: ClassVar[str] = "split"
    preserves: ClassVar[bool] = False

    min_bytes: int = 0

    def __call__(self, program: Program) -> Programs:
        whole = jaxcompat.close_jaxpr(program.jaxpr)
        pinned = _Pinned()
        pinned.leading(whole, [False] * len(whole.outvars))
        body, taken = _Opener(self.min_bytes, pinned.values).opened(whole)
        constants, values = (
            [var for var, _ in taken.values()],
            [value for _, value in taken.values()],
        )
        count = len(program.in_avals)
        args, kwargs = filled(program.in_tree, range(count))
        place = len(jax.tree.leaves(args))
        old, names = body.invars[:count], program.arg_names
        arg_names = unique([*names[:place], *paths("constants", values), *names[place:]])
        invars = [*old[:place], *constants, *old[place:]]
        jaxpr = jaxcompat.replace_jaxpr(body, invars=invars)
        apply = program.replace(
            jaxpr=with_names(jaxpr, program.name, arg_names, program.out_names),
            in_tree=structure(((*args, values), kwargs)),
            arg_names=arg_names,
        )
        return Programs(
            {"constants": _constants_program(program, constants, values), "apply": apply}
        )


def _constants_program(
    program: Program, constants: Sequence[Var], values: Sequence[Any]
) -> Program:
    """Return the program without arguments that returns the list of these constants."""
    out_names = tuple(paths("result", values))
    parts: dict[str, Any] = {"constvars": constants, "consts": values, "invars": (), "eqns": ()}
    jaxpr = jaxcompat.replace_jaxpr(program.jaxpr, outvars=constants, **parts)
    return Program(
        name=program.name,
        jaxpr=with_names(jaxpr, program.name, (), out_names),
        in_tree=structure(((), {})),
        out_tree=structure(values),
        arg_names=(),
        out_names=out_names,
        roots=program.roots,
    )


# --- constants that become arguments --------------------------------------------------------------


@dataclass
class _Opener:
    """The state of opening one program's constants; bodies that equations share are opened once."""

    min_bytes: int
    pinned: set[int]
    memo: Memo = field(default_factory=Memo)

    def opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        """Return a body that takes constants after its arguments, and these constants."""
        return self.memo(lambda: self._opened(body), body)

    def _opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        taken: Taken = {}
        names: dict[Any, Var] = {}
        left: list[tuple[Var, Any]] = []
        for var, value in zip(body.constvars, body.consts, strict=True):
            if self._opens(var, value):
                names[var], _ = taken.setdefault((identity(value), var.aval), (var, value))
            else:
                left.append((var, value))
        eqns = [self._equation(eqn, names, taken) for eqn in body.eqns]
        if not taken:
            return body, taken
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[var for var, _ in left],
            consts=[value for _, value in left],
            invars=[*body.invars, *(var for var, _ in taken.values())],
            outvars=substitute(body.outvars, names),
            eqns=eqns,
        )
        return new, taken

    def _opens(self, var: Var, value: object) -> bool:
        size = None if isinstance(var.aval, jaxcompat.AbstractRef) else size_of(var.aval)
        return size is not None and size >= self.min_bytes and identity(value) not in self.pinned

    def _equation(self, eqn: JaxprEqn, names: Mapping[Any, Var], taken: Taken) -> JaxprEqn:
        """Return an equation whose bodies are passed their constants; adds new ones to `taken`."""
        eqn = with_operands(eqn, names)
        if (inside := open_regions(eqn)) is None:
            return eqn
        return pass_constants(
            inside, [self.opened(body) for body in inside.bodies], taken, self.memo
        )


# --- constants that stay --------------------------------------------------------------------------


@dataclass
class _Pinned:
    """The constants, by identity, that must stay: those that custom derivatives close over.

    So must those of bodies that cannot take more operands.
    """

    values: set[int] = field(default_factory=set)
    memo: Memo = field(default_factory=Memo)

    @rules_followed()
    def leading(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        """Record the constants that stay in a body, and return which of its arguments are fixed.

        `outs` states which results are fixed, and may not depend on a constant that varies.
        """
        return self.memo(lambda: self._leading(body, outs), body, tuple(outs))

    def _leading(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        fixed = {v for v, flag in zip(body.outvars, outs, strict=True) if flag and _is_var(v)}
        for eqn in reversed(body.eqns):
            fixed_outs = [v in fixed for v in eqn.outvars]
            inside = open_regions(eqn)
            if inside is None:
                flags = [any(fixed_outs)] * len(eqn.invars)
                if has_rule(eqn):
                    closed_over = eqn.params["num_consts"]
                    flags[:closed_over] = [True] * closed_over
                    self._note(_rule_constants(eqn))
                for _, inner in sub_jaxprs(eqn):
                    self._note(_constants(inner))
            else:
                flags = inside.backward(fixed_outs, partial(self._through, inside.bodies))
            fixed |= {v for v, flag in zip(eqn.invars, flags, strict=True) if flag and _is_var(v)}
        for var, value in zip(body.constvars, body.consts, strict=True):
            if var in fixed:
                self._note([value])
        return [v in fixed for v in body.invars]

    def _through(
        self, bodies: Sequence[ClosedJaxpr], number: int, outs: Sequence[bool]
    ) -> list[bool]:
        return self.leading(bodies[number], outs)

    def _note(self, values: Iterable[Any]) -> None:
        self.values.update(map(identity, values))


def _is_var(atom: object) -> bool:
    return isinstance(atom, Var)


def _rule_constants(eqn: JaxprEqn) -> Iterator[Any]:
    """Yield the constants of the rule of a custom derivative, and of the rules in it."""
    try:
        rule = custom_rule(eqn)
    except UnsupportedError:
        return  # then it cannot be differentiated
    for jaxpr in rule_jaxprs(rule).values():
        yield from _constants(jaxpr)


def _constants(jaxpr: AnyJaxpr) -> Iterator[Any]:
    """Yield the constants of a jaxpr at any depth."""
    closed = jaxcompat.close_jaxpr(jaxpr)
    yield from closed.consts
    for eqn in equations(jaxcompat.open_jaxpr(closed)):
        for _, inner in sub_jaxprs(eqn):
            yield from getattr(inner, "consts", ())
