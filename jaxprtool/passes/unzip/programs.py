"""init and apply as Programs, from a program and what its split is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import leaf_paths
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.dce import Dce
from jaxprtool.passes.unzip.keys import Arguments
from jaxprtool.passes.unzip.known import EARLY, READY, Context
from jaxprtool.passes.unzip.paths import check_cut
from jaxprtool.passes.unzip.split import Split, split
from jaxprtool.passes.unzip.variables import Variable, leaf_tree, replaced


@dataclass(frozen=True, eq=False)
class VariableLeaf:
    """An array among the variables: its path, its type, and the equation that sows it."""

    path: str
    aval: Any
    eqn: JaxprEqn


@dataclass(frozen=True, eq=False)
class Unzipped:
    """What unzip makes of a program; the variables are in the order of their declaration."""

    init: Program
    apply: Program
    variables: tuple[Variable, ...]

    def leaves(self) -> list[VariableLeaf]:
        """Return the arrays among the variables, in the order of their declaration."""
        order = jax.tree.leaves(leaf_tree(self.variables))
        paths = leaf_paths(self.init.out_tree)
        eqns = [variable.eqn for variable in self.variables for _ in variable.avals]
        found = zip(order, paths, self.init.out_avals, strict=True)
        return [
            VariableLeaf(path, aval, eqns[i])
            for i, path, aval in sorted(found, key=lambda leaf: leaf[0])
        ]


def unzipped(program: Program, tag: str, arguments: Arguments) -> Unzipped:
    """A program split at the variables sown under `tag`, and its arguments so.

    Raises UnzipError and UnsupportedError; see `Unzip`.
    """
    part = _split(program, arguments.marks, tag)
    check_cut(part, tag, program.arg_names, program.out_names)
    tree = leaf_tree(part.variables)
    root, taken = "variables", {re.split(r"\W", name)[0] for name in program.arg_names}
    while root in taken:
        root += "_"
    names = [root + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    init = _init(program, part, arguments.early, tree, names)
    apply = _apply(program, part, arguments.late, tree, names)
    return Unzipped(Dce()(init), Dce()(apply), part.variables)


def _split(program: Program, early: Sequence[bool], tag: str) -> Split:
    ins = [EARLY if flag else READY for flag in early]
    part = split(program.jaxpr, ins, Context(tag))
    if again := replaced(part.variables):
        part = split(program.jaxpr, ins, Context(tag, again))
    return part


def _init(program: Program, part: Split, early: Any, tree: Any, names: Sequence[str]) -> Program:
    order, in_tree = jax.tree.flatten(early)
    leaves, out_tree = jax.tree.flatten(tree)
    body = part.init([False] * len(part.outs))
    places = {position: i for i, position in enumerate(sorted(order))}
    return _program(
        program,
        "init",
        body,
        invars=[body.invars[places[position]] for position in order],
        outvars=[body.outvars[i] for i in leaves],
        trees=(in_tree, out_tree),
        names=([program.arg_names[i] for i in order], names),
    )


def _apply(program: Program, part: Split, late: Any, tree: Any, names: Sequence[str]) -> Program:
    others, kwargs = late
    order = jax.tree.leaves(late)
    leaves = jax.tree.leaves(tree)
    body = part.apply([True] * len(part.outs))
    return _program(
        program,
        "apply",
        body,
        invars=[*(body.invars[i] for i in leaves), *body.invars[len(leaves) :]],
        outvars=body.outvars,
        trees=(jax.tree.structure(((tree, *others), kwargs)), program.out_tree),
        names=([*names, *(program.arg_names[i] for i in order)], program.out_names),
    )


def _program(
    program: Program,
    half: str,
    body: Any,
    *,
    invars: Sequence[Any],
    outvars: Sequence[Any],
    trees: tuple[Any, Any],
    names: tuple[Sequence[str], Sequence[str]],
) -> Program:
    name = f"{program.name}_{half}"
    debug = body.debug_info._replace(
        func_src_info=name, arg_names=tuple(names[0]), result_paths=tuple(names[1])
    )
    jaxpr = jaxcompat.new_jaxpr(body.constvars, body.consts, invars, outvars, body.eqns, debug)
    return program.replace(
        name=name,
        jaxpr=jaxpr,
        in_tree=trees[0],
        out_tree=trees[1],
        arg_names=tuple(names[0]),
        out_names=tuple(names[1]),
    )
