"""unzip: a function that declares variables becomes two, `init` and `apply`.

    def net(key, x):
        w = variable(jax.random.normal(key, (3, 8)), name="w")
        return jnp.tanh(x @ w)

    init, apply = unzip(net)(key, x)
    variables = init(key)              # {"w": ...}
    y = apply(variables, x)            # net(key, x), and takes no key

Arguments named by `key_args` are keys: the first, or with `auto` all that are keys by type. A value
that is computed from keys and constants alone, and sown under the tag, is a variable: a result of
init and an argument of apply. No other path may lead from a key to a result. Loops stack their
variables, scopes nest them (see `split_body` and `rules`).

The contract is that of Oryx's `unzip` (2020-2023), on jaxprs instead of tracers, and extended
to loops, branches and custom derivatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, ClassVar

import jax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.custom_rules import rules_followed
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import equations, named, type_of
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program, Programs, top_jaxpr, type_check
from jaxprtool.ir.regions import Call
from jaxprtool.ir.trees import filled, leaf_paths, structure
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.unzip import rules  # noqa: F401  (they fill the table)
from jaxprtool.passes.unzip.auto import sow_cut
from jaxprtool.passes.unzip.split import (
    CHOSEN,
    EARLY,
    READY,
    Arguments,
    BindingTime,
    Context,
    Outcome,
    Split,
    UnzipError,
    Variable,
    at_positions,
    by_type,
    is_of,
    leaf_tree,
    replaced,
    split_body,
    unzip_rules,
    whole,
)
from jaxprtool.primitives import VARIABLE, sow_p

__all__ = [
    "BindingTime",
    "Context",
    "Outcome",
    "Unzip",
    "UnzipError",
    "Unzipped",
    "Variable",
    "unzip_rules",
    "whole",
]


@dataclass(frozen=True)
class Unzip(Pass):
    """Split a function that declares variables into `init`, which computes them, and `apply`.

    A value that is computed from keys and constants alone, and named by `jaxprtool.variable`,
    is a variable: a result of `init` and an argument of `apply`, which takes no key. Loops
    stack their variables, scopes nest them.

    Args:
        tag: The tag that variables are sown under.
        key_args: The positional arguments that are keys. "auto": the first, or with `auto=True` all
            arguments that are keys by type.
        auto: Choose the variables: the values with the fewest bytes that cut the keys off from the
            results.
        known: Choose the variables for partial evaluation, with these arguments known before the
            others.

    Raises:
        UnsupportedError: If there is another path from a key to a result, which the message shows;
            if variables are sown an unknown number of times, as in a while loop; or if ordered
            effects belong to both programs.

    Note:
        `jaxprtool unzip TARGET` does the same, and lists the variables.

    Example:
        def f(key, x):
            w = jaxprtool.variable(jax.random.bits(key, (3,)), name="w")
            return w * x

        $ jaxprtool opt f.py:f --args "key(0), u32[3]" -p unzip
        # init
        { lambda ; a:key<fry>[]. let
            b:u32[3] = random_bits[bit_width=32 shape=(3,)] a
          in (b,) }

        # apply
        { lambda ; a:u32[3] b:u32[3]. let c:u32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "unzip"
    group: ClassVar[str] = "split"
    preserves: ClassVar[bool] = False

    tag: str | None = VARIABLE
    key_args: int | tuple[int, ...] | str | None = "auto"
    auto: bool = False
    known: int | tuple[int, ...] | None = None

    def __call__(self, program: Program) -> Programs:
        parts = self.unzipped(program)
        return Programs({"init": parts.init, "apply": parts.apply})

    @rules_followed()
    def unzipped(self, program: Program) -> Unzipped:
        """Return init and apply, and the variables between them.

        Raises UnzipError if the variables do not cut keys from the results, if their names are
        missing or not unique, or if no argument is a key; ArgumentsError for unknown `key_args`;
        and UnsupportedError, which names the equation, for variables that cannot be extracted.
        """
        if self.tag is None:
            raise UnzipError("Must provide a tag to unzip.")
        if self.auto and self.known is not None:
            raise ArgumentsError(
                "auto and known exclude each other: auto chooses variables for keys, known for "
                "other arguments"
            )
        arguments = self._arguments(program)
        if not self.auto and self.known is None:
            return unzipped(program, self.tag, arguments)
        sown = sow_cut(program, arguments.marks, CHOSEN, self.known is not None)
        return unzipped(sown, CHOSEN, arguments)

    def _arguments(self, program: Program) -> Arguments:
        """Return the arguments that init takes, and the others."""
        early = self.key_args if self.known is None else self.known
        if isinstance(early, str):
            if early != "auto":
                raise ArgumentsError(
                    f"key_args must be a position, positions or 'auto', not {early!r}"
                )
            if self.auto:
                return by_type(program)
            early = 0
        return at_positions(program, (early,) if isinstance(early, int) else early or ())


# --- programs -------------------------------------------------------------------------------------
# init and apply as Programs, from a program and its split.


@dataclass(frozen=True, eq=False)
class VariableLeaf:
    """An array among the variables: its path, its type, and the equation that sows it."""

    path: str
    aval: Aval
    eqn: JaxprEqn


@dataclass(frozen=True, eq=False)
class Unzipped:
    """The result of unzipping a program; the variables are in the order of their declaration."""

    init: Program
    apply: Program
    variables: tuple[Variable, ...]

    def leaves(self) -> list[VariableLeaf]:
        """Return the arrays among the variables, in the order of their declaration."""
        order = jax.tree.leaves(leaf_tree(self.variables))
        paths = leaf_paths(self.init.out_tree)
        eqns = [variable.eqn for variable in self.variables for _ in variable.avals]
        leaves = zip(order, paths, self.init.out_avals, strict=True)
        return [
            VariableLeaf(path, aval, eqns[i])
            for i, path, aval in sorted(leaves, key=lambda leaf: leaf[0])
        ]


def unzipped(program: Program, tag: str, arguments: Arguments) -> Unzipped:
    """Split a program, with its arguments, at the variables sown under `tag`.

    Raises UnzipError and UnsupportedError; see `Unzip`.
    """
    part = _split(program, arguments.marks, tag)
    check_cut(part, tag, program.arg_names, program.out_names)
    tree = leaf_tree(part.variables)
    leaves, out_tree = jax.tree.flatten(tree)
    root, taken = "variables", {re.split(r"\W", name)[0] for name in program.arg_names}
    while root in taken:
        root += "_"
    paths = jax.tree.leaves_with_path(tree)
    names = tuple(root + jax.tree_util.keystr(path) for path, _ in paths)
    jaxpr = part.init([False] * len(part.outs))
    order, in_tree = jax.tree.flatten(arguments.early)
    early = dict(zip(sorted(order), jaxpr.invars, strict=True))
    init = _pruned(
        program.replace(
            name=f"{program.name}_init",
            in_tree=in_tree,
            out_tree=out_tree,
            arg_names=tuple(program.arg_names[i] for i in order),
            out_names=names,
        ),
        jaxpr,
        [early[i] for i in order],
        [jaxpr.outvars[i] for i in leaves],
    )
    jaxpr = part.apply([True] * len(part.outs))
    others, kwargs = arguments.late
    apply = _pruned(
        program.replace(
            name=f"{program.name}_apply",
            in_tree=structure(((tree, *others), kwargs)),
            arg_names=(*names, *(program.arg_names[i] for i in jax.tree.leaves(arguments.late))),
        ),
        jaxpr,
        [*(jaxpr.invars[i] for i in leaves), *jaxpr.invars[len(leaves) :]],
        jaxpr.outvars,
    )
    return Unzipped(init, apply, tuple(part.variables))


def _split(program: Program, early: Sequence[bool], tag: str) -> Split:
    ins = [EARLY if flag else READY for flag in early]
    part = split_body(program.jaxpr, ins, Context(tag))
    if again := replaced(part.variables):
        part = split_body(program.jaxpr, ins, Context(tag, again))
    return part


def _pruned(
    program: Program, body: ClosedJaxpr, invars: Sequence[Var], outvars: Sequence[Atom]
) -> Program:
    """Return a program with a new body and without dead code; its names and trees are set."""
    debug = body.debug_info._replace(
        func_src_info=program.name, arg_names=program.arg_names, result_paths=program.out_names
    )
    jaxpr = jaxcompat.new_jaxpr(body.constvars, body.consts, invars, outvars, body.eqns, debug)
    return Dce()(program.replace(jaxpr=jaxpr))


# --- request --------------------------------------------------------------------------------------
# The split for the command line, which also explains likely mistakes.
#
# It gives the programs of `jaxprtool.unzip`, which follows Oryx's contract: an argument of any type
# may be used as a key.

_HINT = "name the arguments that are keys with --key-args"


@dataclass(frozen=True)
class UnzipRequest:
    """The requested options; None for unspecified ones. Positions are those of the function.

    Attributes:
        key_args: The positions of keys.
        tag: The tag that variables are sown under.
        auto: True to choose the variables, instead of those that are sown.
        known: Instead of keys, the positions of the arguments that init takes.
    """

    key_args: tuple[int, ...] | None
    tag: str | None
    auto: bool
    known: tuple[int, ...] | None

    def split(self, program: Program, position: Callable[[int], int]) -> Unzipped:
        """Return init and apply, and the variables between them.

        Args:
            program: The program of the function.
            position: Converts the function's position of an argument to the program's.

        Raises:
            ArgumentsError: For positions of no argument, and for a tag under which nothing is sown.
            UnzipError: As `Unzip` does.
        """
        if self.known is not None:
            parts = Unzip(known=tuple(map(position, self.known))).unzipped(program)
        elif self.auto:
            keys = "auto" if self.key_args is None else self._keys(program, position)
            parts = Unzip(key_args=keys, auto=True).unzipped(program)
        else:
            parts = self._split_at_sown(program, self._keys(program, position))
        for part in (parts.init, parts.apply):
            type_check(part, program)
        return parts

    def _split_at_sown(self, program: Program, keys: tuple[int, ...]) -> Unzipped:
        eqns = equations(top_jaxpr(program))
        tags = {eqn.params["tag"] for eqn in eqns if eqn.primitive is sow_p}
        if self.tag is not None and self.tag not in tags:
            there = f"available: {', '.join(sorted(tags))}" if tags else None
            message = f"{program.name} sows nothing under the tag '{self.tag}'"
            raise ArgumentsError(message, did_you_mean(self.tag, tags) or there)
        try:
            return Unzip(tag=self.tag or VARIABLE, key_args=keys).unzipped(program)
        except UnzipError as error:
            hint = error.hint or self._hint(program, keys)
            if self.tag is None and VARIABLE not in tags:
                hint = "--auto chooses variables where none are declared"
            raise UnzipError(error.message, hint) from error

    def _keys(self, program: Program, position: Callable[[int], int]) -> tuple[int, ...]:
        """Return the positional arguments of the program that are keys. Raises ArgumentsError."""
        args, _ = _positions(program)
        key_args = self.key_args
        if key_args is None:
            key_args = (0,) if args else ()
        try:
            return tuple(map(position, key_args))
        except ArgumentsError as error:
            raise ArgumentsError(error.message, _HINT) from None

    def _hint(self, program: Program, keys: tuple[int, ...]) -> str | None:
        """Return a hint that names an argument that cannot be a key, if none was asked for."""
        args, _ = _positions(program)
        for leaf in jax.tree.leaves([args[key] for key in keys if self.key_args is None]):
            aval = program.in_avals[leaf]
            # Keys of both types, and integers from which keys are created.
            if not (is_of(aval, jax.dtypes.prng_key) or is_of(aval, jnp.integer)):
                return f"'{program.arg_names[leaf]}' is {type_of(aval)}, not a key: {_HINT}"
        return None


def _positions(program: Program) -> Any:
    return filled(program.in_tree, range(len(program.in_avals)))


# --- paths ----------------------------------------------------------------------------------------
# Report why variables do not cut off the keys: a path from a key to its use in apply.

#: The number of lines, and of equations of a line, shown at either end of a long path.
SHOWN = 5


def check_cut(part: Split, tag: str, in_names: Sequence[str], out_names: Sequence[str]) -> None:
    """Raise UnzipError, with the path, if apply needs a key that passes through no variable.

    The path leads from the key to a result, or to an equation whose effect needs keys and other
    arguments.
    """
    for atom, binding_time, name in zip(part.body.outvars, part.outs, out_names, strict=True):
        if not binding_time.ready:
            raise _uncut(tag, *_path(part, atom), in_names, [name])
    if part.stuck:
        raise _uncut(tag, *_path_of(part, part.stuck[0]), in_names, [])


def _uncut(
    tag: str, start: int, steps: list[JaxprEqn], in_names: Sequence[str], end: list[str]
) -> UnzipError:
    shown = _ends([_line(place, list(eqns)) for place, eqns in groupby(steps, _place)])
    path = " -> ".join([in_names[start], *shown, *end])
    hint = None
    for eqn in steps:
        if eqn.primitive.name == "sow" and eqn.params["tag"] == tag:
            hint = f"the {named(eqn)} is not a variable: it depends on more than keys"
    return UnzipError(f"Variables do not cut dependence graph. {path}", hint)


def _place(eqn: JaxprEqn) -> str | None:
    """Return the line of the user's own source that an equation comes from."""
    return next(iter(frames_now().texts(eqn)), None)


def _line(place: str | None, eqns: Sequence[JaxprEqn]) -> str:
    """Return the equations of one line as text; calls by the names of their functions."""
    names = [eqn.params["name"] if eqn.primitive.name == "jit" else eqn.primitive for eqn in eqns]
    return ", ".join(_ends(list(map(str, names)))) + ("" if place is None else f" at {place}")


def _ends(steps: list[str]) -> list[str]:
    """Return the first and last steps, with the number of those between them."""
    if len(steps) <= 2 * SHOWN + 1:
        return steps
    return [*steps[:SHOWN], f"({len(steps) - 2 * SHOWN} more)", *steps[-SHOWN:]]


def _path(part: Split, atom: Atom) -> tuple[int, list[JaxprEqn]]:
    """Return the argument that a value that is not ready comes from, and the path's equations."""
    invars = {v: i for i, v in enumerate(part.body.invars)}
    definitions = DefUse(part.body.eqns).definitions
    steps: list[list[JaxprEqn]] = []
    while atom not in invars:
        atom, inner = _before(part, definitions[atom][0], atom)
        steps.append(inner)
    return invars[atom], list(chain.from_iterable(reversed(steps)))


def _path_of(part: Split, eqn: JaxprEqn) -> tuple[int, list[JaxprEqn]]:
    """Return the path to an equation with an effect, into the body that holds the effect."""
    position = next(i for i, e in enumerate(part.body.eqns) if e is eqn)
    inner: list[JaxprEqn] = [eqn]
    operand = _unready(part, eqn)
    for body in part.parts.get(position, ()):
        if body.stuck and eqn.primitive.name in Call.primitives:
            index, inner = _path_of(body, body.stuck[0])
            operand = eqn.invars[index]
    start, steps = _path(part, operand)
    return start, [*steps, *inner]


def _before(part: Split, position: int, atom: Var) -> tuple[Var, list[JaxprEqn]]:
    """Return the operand that keeps a result from being ready, and the equations between."""
    eqn = part.body.eqns[position]
    if position in part.parts and eqn.primitive.name in Call.primitives:
        (body,) = part.parts[position]
        index, steps = _path(body, body.body.outvars[eqn.outvars.index(atom)])
        # Equations inside a library's own call have no line of user code.
        is_user_code = any(jaxcompat.user_frame(step) for step in steps)
        return eqn.invars[index], steps if is_user_code else [eqn]
    return _unready(part, eqn), [eqn]


def _unready(part: Split, eqn: JaxprEqn) -> Var:
    for atom in eqn.invars:
        if not isinstance(atom, Literal) and not part.times[atom].ready:
            return atom
    raise AssertionError(f"all operands of {named(eqn)} are ready")
