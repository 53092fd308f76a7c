"""Programs for the tests of `execute`, made without `jaxprtool.loading`."""

import jax

from jaxprtool.ir.program import Program


def program(fun, *args) -> Program:
    """Return a Program of a function of positional arrays. Its arguments are named a0, a1, …"""
    jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    names = tuple(f"a{i}" for i in range(len(jaxpr.invars)))
    outs = tuple(f"result[{i}]" for i in range(len(jaxpr.outvars)))
    name = getattr(fun, "__name__", "f")
    return Program(
        name, jaxpr, jax.tree.structure((args, {})), jax.tree.structure(shape), names, outs
    )
