"""Stacked arguments in place of the rows that a program would stack itself.

Of the arguments of one stack, the first is replaced by the stacked array, and the others are
removed: a whole argument is omitted, a part of one is None, which JAX's trees skip. So
`{"layer_0": {"w": f32[4]}, "layer_1": {"w": f32[4]}}` becomes
`{"layer_0": {"w": f32[2,4]}, "layer_1": {"w": None}}`, whatever the classes of its nodes.

A result, or a part of one, that has the tree of a changed argument is changed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.structured import keep
from jaxprtool.ir.programs.jit_options import ValueOptions
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.programs.trees import filled, structure
from jaxprtool.ir.rewriting.rewrite import Writer
from jaxprtool.jaxcompat import Atom, Jaxpr, Var
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.framework.retrace import retraced
from jaxprtool.passes.loops.roll.rows import Rows
from jaxprtool.passes.loops.roll.writing import whole_array, write_stack
from jaxprtool.passes.transforms.closed import remaining

#: The stacked arrays of a program, each with its rows, as numbers of arguments.
Groups = dict[Var, list[int]]


def with_stacked_arguments(
    program: Program, stacks: Mapping[Var, Sequence[Atom]]
) -> Program | Programs:
    """Turn arrays that a program stacks from its arguments into arguments.

    Args:
        program: A program without dead code.
        stacks: The arrays, each with its rows.

    Returns:
        The new program and the functions that stack and unstack the arguments that change; the
        program itself if none does.

    Raises:
        UnsupportedError: If an argument is also used outside of its stack, or has a sharding.
    """
    numbers = {v: i for i, v in enumerate(program.jaxpr.invars)}
    made = {v for eqn in program.jaxpr.eqns for v in eqn.outvars}
    groups = {
        array: [numbers[v] for v in rows if isinstance(v, Var)]
        for array, rows in stacks.items()
        if array in made and all(isinstance(v, Var) and v in numbers for v in rows)
    }
    groups = {array: rows for array, rows in groups.items() if len(set(rows)) == len(rows)}
    if not groups:
        return program
    lifted = _lifted(program, groups)
    _check_unused(lifted, groups)
    first = {rows[0]: array for array, rows in groups.items()}
    removed = {i for rows in groups.values() for i in rows[1:]}
    free = [i not in removed for i in range(len(numbers))]
    invars = [first.get(i, v) for i, v in enumerate(lifted.jaxpr.invars[: len(numbers)])]
    arguments = _Arguments(program, groups, remaining(program, free))
    rolled = program.replace(
        jaxpr=jaxcompat.replace_jaxpr(lifted.jaxpr, invars=keep(invars, free)),
        in_tree=structure(arguments.after),
        arg_names=keep(program.arg_names, free),
    )
    rolled = _with_donations(program, rolled, groups)
    rolled = _with_stacked_results(rolled, arguments)
    return Programs({"rolled": rolled, "stack": arguments.stack(), "unstack": arguments.unstack()})


def _lifted(program: Program, groups: Groups) -> Program:
    """Return the program with the stacked arrays as additional arguments at the end."""
    jaxpr = program.jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if not any(v in groups for v in eqn.outvars)]
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, eqns=eqns, invars=[*jaxpr.invars, *groups])
    more = [program.arg_names[rows[0]] for rows in groups.values()]
    tree = structure((tuple(range(len(jaxpr.invars))), {}))
    names = (*program.arg_names, *more)
    return Dce()(program.replace(jaxpr=jaxpr, in_tree=tree, arg_names=names))


def _check_unused(program: Program, groups: Groups) -> None:
    """Raise UnsupportedError if a row of a stack is read, or has a sharding of its own."""
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    asked = program.jit.of_arguments(program.arguments) if program.jit is not None else ()
    for i in (i for rows in groups.values() for i in rows):
        name = program.arg_names[i]
        if asked and asked[i].placement is not None:
            raise UnsupportedError(f"roll: argument {name} has its own sharding or layout")
        if reader := _reader(jaxpr, jaxpr.invars[i]):
            raise UnsupportedError(
                f"roll: argument {name} is also used outside the repetition: it is {reader}",
                "roll(stack='inside') does not change the arguments",
            )


def _reader(jaxpr: Jaxpr, var: Var) -> str:
    """Return the first use of an argument, in words; empty if it is not used."""
    for eqn in jaxpr.eqns:
        if var in eqn.invars:
            return f"read by {named(eqn)}"
    return "a result" if var in jaxpr.outvars else ""


def _with_donations(before: Program, after: Program, groups: Groups) -> Program:
    """Return the program with stacked arguments donated if all their rows were."""
    if before.jit is None:
        return after
    asked = before.jit.of_arguments(before.arguments)
    more = tuple(
        ValueOptions(asked[rows[0]].name, array.aval.shape, array.aval.dtype, donated=True)
        for array, rows in groups.items()
        if all(asked[i].donated for i in rows)
    )
    return after.replace(jit=replace(before.jit, arguments=(*before.jit.arguments, *more)))


# --- the arguments that change ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Arguments:
    """The arguments of a program before and after some of them are stacked.

    Attributes:
        program: The program before.
        groups: The stacked arrays.
        after: The positional and keyword arguments after, as numbers of flat ones before.
    """

    program: Program
    groups: Groups
    after: tuple[tuple[Any, ...], dict[str, Any]]

    @property
    def changed(self) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments that change, before stacking, as numbers."""
        args, kwargs = filled(self.program.in_tree, range(len(self.program.arg_names)))
        changes = self._changes
        return [v for v in args if changes(v)], {k: v for k, v in kwargs.items() if changes(v)}

    def _changes(self, value: object) -> bool:
        numbers = {i for rows in self.groups.values() for i in rows}
        return not numbers.isdisjoint(jax.tree.leaves(value))

    def _both(self) -> tuple[Any, Any]:
        """Return the changed arguments before and after: those of `stack` and of `unstack`."""
        args, kwargs = self.after
        changes = self._changes
        after = tuple(filter(changes, args)), {k: v for k, v in kwargs.items() if changes(v)}
        before = self.changed
        return (tuple(before[0]), before[1]), after

    def stack(self) -> Program:
        """Return the program that stacks arguments."""
        before, after = self._both()
        arrays = {rows[0]: rows for rows in self.groups.values()}

        def values(given: dict[int, Any], i: int) -> Any:
            return lax.stack([given[j] for j in arrays[i]]) if i in arrays else given[i]

        return self._traced("stack", before, after, values)

    def unstack(self) -> Program:
        """Return the inverse of the program `stack`."""
        before, after = self._both()
        row = {i: (rows[0], n) for rows in self.groups.values() for n, i in enumerate(rows)}

        def values(given: dict[int, Any], i: int) -> Any:
            if i not in row:
                return given[i]
            array, number = row[i]
            return lax.index_in_dim(given[array], number, keepdims=False)

        return self._traced("unstack", after, before, values)

    def _traced(
        self, name: str, taken: Any, given: Any, value: Callable[[dict[int, Any], int], Any]
    ) -> Program:
        """Return a program from some arguments to others."""
        program, numbers = self.program, jax.tree.leaves(taken)
        stacked = {rows[0]: array.aval for array, rows in self.groups.items()}
        avals = (
            program.in_avals
            if name == "stack"
            else {**dict(enumerate(program.in_avals)), **stacked}
        )
        args, kwargs = given
        result = (args, kwargs) if kwargs else args[0] if len(args) == 1 else args

        def fun(*args: Any, **kwargs: Any) -> Any:
            known = dict(zip(numbers, jax.tree.leaves((args, kwargs)), strict=True))
            return jax.tree.map(lambda i: value(known, i), result)

        return retraced(
            program.replace(name=f"{program.name}_{name}", jit=None),
            "roll",
            fun,
            in_tree=structure(taken),
            avals=[avals[i] for i in numbers],
            arg_names=[program.arg_names[i] for i in numbers],
        )


# --- results of the tree of an argument -------------------------------------------------------


def _with_stacked_results(program: Program, arguments: _Arguments) -> Program:
    """Return the program with results stacked where they have the tree of an argument."""
    jaxpr = program.jaxpr
    rows = Rows()
    for eqn in jaxpr.eqns:
        rows.record(eqn)
    outvars, removed = list(jaxpr.outvars), set[int]()
    writer = Writer(jaxpr, False, lambda eqn: eqn)
    for group in _result_groups(program, arguments):
        values = [jaxpr.outvars[i] for i in group]
        parts = rows.parts(values, lambda _: True)
        whole = whole_array(parts)
        outvars[group[0]] = whole or write_stack(writer, parts, jaxpr.eqns[-1])
        removed.update(group[1:])
    if not removed:
        return program
    free = [i not in removed for i in range(len(outvars))]
    out = filled(program.out_tree, [0 if flag else None for flag in free])
    new = jaxcompat.replace_jaxpr(
        jaxpr, eqns=[*jaxpr.eqns, *writer.eqns], outvars=keep(outvars, free)
    )
    names = keep(program.out_names, free)
    return Dce()(program.replace(jaxpr=new, out_tree=structure(out), out_names=names))


def _result_groups(program: Program, arguments: _Arguments) -> Iterator[list[int]]:
    """Yield each group of flat results that is stacked."""
    args, kwargs = arguments.changed
    positions: dict[PyTreeDef, list[list[int]]] = {}
    for value in (*args, *kwargs.values()):
        numbers, tree = jax.tree.flatten(value)
        within = [rows for rows in arguments.groups.values() if set(rows) <= set(numbers)]
        positions[tree] = [[i - numbers[0] for i in rows] for rows in within]

    def walk(tree: PyTreeDef, start: int) -> Iterator[list[int]]:
        if tree in positions:
            groups = [[start + i for i in rows] for rows in positions[tree]]
            if all(_one_type(program, rows) for rows in groups):
                yield from groups
            return
        for child in tree.children():
            yield from walk(child, start)
            start += child.num_leaves

    yield from walk(program.out_tree, 0)


def _one_type(program: Program, results: Sequence[int]) -> bool:
    avals = [program.out_avals[i] for i in results]
    return all(
        getattr(a, "shape", None) == avals[0].shape and a.dtype == avals[0].dtype for a in avals
    )
