"""Programs for the tests of `execute`, made without the loading wing."""

import jax

from jaxprtool.ir.programs.program import Program


def program(fun, *args) -> Program:
    """A Program of a function of positional arrays; its arguments are called a0, a1, …"""
    jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    names = tuple(f"a{i}" for i in range(len(jaxpr.invars)))
    outs = tuple(f"result[{i}]" for i in range(len(jaxpr.outvars)))
    name = getattr(fun, "__name__", "f")
    return Program(
        name, jaxpr, jax.tree.structure((args, {})), jax.tree.structure(shape), names, outs
    )
