"""init and apply as Programs, from a program and its split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import leaf_paths, structure
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.unzip.binding_times import EARLY, READY, Context
from jaxprtool.passes.unzip.keys import Arguments
from jaxprtool.passes.unzip.paths import check_cut
from jaxprtool.passes.unzip.split import Split, split
from jaxprtool.passes.unzip.variables import Variable, leaf_tree, replaced


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
        found = zip(order, paths, self.init.out_avals, strict=True)
        return [
            VariableLeaf(path, aval, eqns[i])
            for i, path, aval in sorted(found, key=lambda leaf: leaf[0])
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
    part = split(program.jaxpr, ins, Context(tag))
    if again := replaced(part.variables):
        part = split(program.jaxpr, ins, Context(tag, again))
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
