"""Convert programs that take Refs to programs that take and return the contents of the Refs.

A run writes to its Refs, so the next run would start with their new contents. Code that runs a
program several times, or compares runs, gives each run fresh Refs with the same contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Var


def is_ref(value: object) -> bool:
    """Return True for a Ref, or the type of one."""
    return isinstance(value, jax.Ref) or getattr(value, "is_ref", False) is True


@jax.transfer_guard("allow")
def contents(value: Any) -> Any:
    """Return the contents of a Ref, or their type for the type of a Ref; else the value itself."""
    if isinstance(value, jax.Ref):
        return value[...]
    return value.update(is_ref=False) if is_ref(value) else value


def all_contents(program: Program, values: Sequence[Any]) -> list[Any]:
    """Return flat arguments of a program with Refs replaced by their contents.

    Raises:
        ArgumentsError: If one Ref is given for two arguments.
    """
    refs = [id(value) for value in values if isinstance(value, jax.Ref)]
    if len(set(refs)) < len(refs):
        raise ArgumentsError(
            f"{program.name} receives one Ref for two arguments, which JAX forbids"
        )
    return list(map(contents, values))


def with_contents(program: Program, like: Program | None = None) -> Program:
    """Return a program that takes the contents of its Refs, and returns their contents at the end.

    The Refs are its arguments, and those that it closes over. Each run allocates fresh ones.
    Further results, `r[...]` for the Ref `r`, are their contents at the end, except for a Ref that
    the program frees. The equations of the program are the same objects.

    Args:
        program: The program. One without Refs is returned as it is.
        like: The result of this function for another program. The result also takes the contents of
            Refs that this one takes, but `program` does not, and returns them unchanged.
    """
    body = program.jaxpr
    names = {f"constant[{i}]": var for i, var in enumerate(body.constvars)}
    names |= dict(zip(program.arg_names, body.invars, strict=True))
    refs = {name: var for name, var in names.items() if isinstance(var.aval, jaxcompat.AbstractRef)}
    spare = _spare(program, like)
    if not refs and not spare:
        return program
    made, read = _made_and_read(list(refs.values()))
    held = {eqn.outvars[0]: eqn.invars[0] for eqn in made}
    freed = {eqn.invars[0] for eqn in body.eqns if traits(eqn).ends_ref}
    after: dict[str, Atom] = {
        f"{name}[...]": eqn.outvars[0]
        for (name, var), eqn in zip(refs.items(), read, strict=True)
        if var not in freed
    }
    given = {name: Var(aval) for name, aval in spare.items()}
    after |= {f"{name}[...]": var for name, var in given.items()}
    wanted = after if like is None else [name for name in like.out_names if name in after]
    kept_read = [eqn for eqn in read if eqn.invars[0] not in freed]
    jaxpr = jaxcompat.replace_jaxpr(
        body,
        constvars=[held.get(v, v) for v in body.constvars],
        consts=list(map(contents, body.consts)),
        invars=[*(held.get(v, v) for v in body.invars), *given.values()],
        outvars=[*body.outvars, *(after[name] for name in wanted)],
        eqns=[*made, *body.eqns, *kept_read],
    )
    in_tree = program.in_tree
    if given:
        in_tree = jax.tree.structure((tuple(jaxpr.invars), {}))
    return program.replace(
        jaxpr=jaxpr,
        in_tree=in_tree,
        out_tree=jax.tree_util.treedef_tuple(
            [program.out_tree, jax.tree.structure([0] * len(wanted))]
        ),
        arg_names=(*program.arg_names, *given),
        out_names=(*program.out_names, *wanted),
    )


def _spare(program: Program, like: Program | None) -> dict[str, Aval]:
    """Return the contents' types of Refs that the other program takes, but this one does not."""
    if like is None:
        return {}
    return {
        name: aval
        for name, aval in like.arguments
        if f"{name}[...]" in like.out_names and name not in program.arg_names
    }


def _made_and_read(refs: Sequence[Var]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return equations that create Refs from their contents, and equations that read them."""

    def template(*values: Any) -> list[Any]:
        made = [
            jax.new_ref(x, memory_space=ref.aval.memory_space, kind=ref.aval.kind)
            for x, ref in zip(values, refs, strict=True)
        ]
        return list(map(jax.freeze, made))

    jaxpr = jaxcompat.trace_flat(template, "contents", [ref.aval.inner_aval for ref in refs])
    count = len(refs)
    names = {eqn.outvars[0]: ref for eqn, ref in zip(jaxpr.eqns[:count], refs, strict=True)}
    nowhere = jaxcompat.NO_SOURCE
    return (
        [
            eqn.replace(outvars=[names[eqn.outvars[0]]], source_info=nowhere)
            for eqn in jaxpr.eqns[:count]
        ],
        [
            eqn.replace(invars=[names[eqn.invars[0]]], source_info=nowhere)
            for eqn in jaxpr.eqns[count:]
        ],
    )
