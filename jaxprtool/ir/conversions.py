"""Convert programs: Refs to their contents, and batched predicates of loops to scalar ones.

A run writes to its Refs, so the next run would start with their new contents. Code that runs a
program several times, or compares runs, gives each run fresh Refs with the same contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.equations import substitute, with_operands
from jaxprtool.ir.program import Program, require_program
from jaxprtool.ir.regions import While, view
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Var

# --- ref contents ---------------------------------------------------------------------------------
# Convert programs that take Refs to programs that take and return the contents of the Refs.


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
    require_program(program)
    body = program.jaxpr
    names = {f"constant[{i}]": var for i, var in enumerate(body.constvars)}
    names |= dict(zip(program.arg_names, body.invars, strict=True))
    refs = {name: var for name, var in names.items() if isinstance(var.aval, jaxcompat.AbstractRef)}
    spare = _spare(program, like)
    if not refs and not spare:
        return program
    allocations, read = _made_and_read(list(refs.values()))
    initial = {eqn.outvars[0]: eqn.invars[0] for eqn in allocations}
    freed = {eqn.invars[0] for eqn in body.eqns if traits(eqn).ends_ref}
    after: dict[str, Atom] = {
        f"{name}[...]": eqn.outvars[0]
        for (name, var), eqn in zip(refs.items(), read, strict=True)
        if var not in freed
    }
    spare_vars = {name: Var(aval) for name, aval in spare.items()}
    after |= {f"{name}[...]": var for name, var in spare_vars.items()}
    wanted = after if like is None else [name for name in like.out_names if name in after]
    kept_read = [eqn for eqn in read if eqn.invars[0] not in freed]
    jaxpr = jaxcompat.replace_jaxpr(
        body,
        constvars=[initial.get(v, v) for v in body.constvars],
        consts=list(map(contents, body.consts)),
        invars=[*(initial.get(v, v) for v in body.invars), *spare_vars.values()],
        outvars=[*body.outvars, *(after[name] for name in wanted)],
        eqns=[*allocations, *body.eqns, *kept_read],
    )
    in_tree = program.in_tree
    if spare_vars:
        in_tree = jax.tree.structure((tuple(jaxpr.invars), {}))
    return program.replace(
        jaxpr=jaxpr,
        in_tree=in_tree,
        out_tree=jax.tree_util.treedef_tuple(
            [program.out_tree, jax.tree.structure([0] * len(wanted))]
        ),
        arg_names=(*program.arg_names, *spare_vars),
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
        new_refs = [
            jax.new_ref(x, memory_space=ref.aval.memory_space, kind=ref.aval.kind)
            for x, ref in zip(values, refs, strict=True)
        ]
        return list(map(jax.freeze, new_refs))

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


# --- scalar predicates ----------------------------------------------------------------------------
# Convert `while` loops with a predicate batched by `vmap` to loops with a scalar predicate.
#
# Such a loop continues while the predicate holds for any batch element; the elements for which it
# does not hold keep their carry. JAX lowers the loop in this way; code that runs it one iteration
# at a time needs the same as a jaxpr.


def with_scalar_predicates(program: Program) -> Program:
    """Return an equivalent program in which each `while` has a scalar predicate.

    Other equations keep their identity, unless they hold such a loop. Loops with effects are not
    changed.
    """
    jaxpr = map_equations(program.jaxpr, _with_scalar_predicate)
    return program if jaxpr is program.jaxpr else replace(program, jaxpr=jaxpr)


def _with_scalar_predicate(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    loop = view(eqn)
    if not isinstance(loop, While) or eqn.effects or not loop.cond.outvars[0].aval.shape:
        return None
    cond, body = loop.cond, loop.body
    cond_consts, carry = _split(cond.invars, len(loop.cond_consts))
    body_consts, own_carry = _split(body.invars, len(loop.body_consts))
    # The body computes the predicate by the same equation objects as the condition, so that a
    # message about them is shown only once.
    names = dict(zip(own_carry, carry, strict=True))
    new = substitute(body.outvars, names)
    any_eqns, any_element = _traced(eqn, _any_element, cond.outvars)
    choosing, chosen = _traced(eqn, _chosen, [*cond.outvars, *carry, *new])
    rebuilt = loop.rebuild(
        cond=jaxcompat.replace_jaxpr(cond, outvars=any_element, eqns=[*cond.eqns, *any_eqns]),
        body=jaxcompat.replace_jaxpr(
            body,
            constvars=[*cond.constvars, *body.constvars],
            consts=[*cond.consts, *body.consts],
            invars=[*cond_consts, *body_consts, *carry],
            outvars=chosen,
            eqns=[*cond.eqns, *(with_operands(eqn, names) for eqn in body.eqns), *choosing],
        ),
        body_consts=(*loop.cond_consts, *loop.body_consts),
    )
    return [rebuilt]


def _any_element(predicate: Any) -> list[Any]:
    return [lax.reduce_or(predicate, range(predicate.ndim))]


def _chosen(predicate: Any, *values: Any) -> list[Any]:
    """Select the new carry where the predicate holds, and else the old one."""
    pairs = zip(*_split(values, len(values) // 2), strict=True)
    axes = range(predicate.ndim)
    return [
        lax.select(lax.broadcast_in_dim(predicate, new.shape, axes), new, old) for old, new in pairs
    ]


def _traced(
    like: JaxprEqn, function: Callable[..., Any], operands: Sequence[Atom]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Trace a function of operands, and return its equations and results."""
    closed = jaxcompat.traced_like(like, function, operands)
    names = dict(zip(closed.invars, operands, strict=True))
    eqns = [with_operands(eqn, names) for eqn in closed.eqns]
    return eqns, substitute(closed.outvars, names)


def _split(values: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    return values[:count], values[count:]
