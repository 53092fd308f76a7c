"""Pieces of a program: the equations that compute some values from known ones.

A piece is run in the same way as its variant: compiled as a whole, or one equation at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, described
from jaxprtool.execute.compare.variants import Variant
from jaxprtool.execute.running.run import choose_device, failures_reported, ready
from jaxprtool.ir.basics.dtypes import as_array
from jaxprtool.ir.core.equations import free_variables, variables
from jaxprtool.ir.evaluation.interpret import evaluate
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

_DEBUG = DebugInfo("piece", "piece", None, None)


class Executor:
    """The place and mode in which a variant runs.

    Args:
        variant: The variant.
        arguments: Its flat arguments.
    """

    def __init__(self, variant: Variant, arguments: Sequence[Any]):
        program = variant.program
        self._program, self.op_by_op = program, variant.op_by_op
        self._options = dict(program.jit.compiler_options) if program.jit else {}
        self.arguments = arguments
        self._device = choose_device(program, variant.platform, variant.index)
        with self.running() as self.arguments:
            pass

    @contextmanager
    def running(self) -> Iterator[Sequence[Any]]:
        """Run the block where the variant runs, and yield its arguments there."""
        place = ready(self._program, self.arguments, self._device)
        with failures_reported(self._program), place as (arguments, _):
            yield arguments

    def run(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a body.

        Raises UnsupportedError if the body cannot be compiled.
        """
        with self.running():
            if self.op_by_op:
                return list(map(as_array, evaluate(body, arguments)))
            try:
                fun = jax.jit(jaxcompat.jaxpr_as_fun(body), compiler_options=self._options or None)
                compiled = fun.trace(*arguments).lower().compile()
            except Exception as error:  # lowering rules may raise anything
                name = self._program.name
                raise UnsupportedError(
                    f"a part of {name} cannot be compiled: {described(error)}"
                ) from error
            return list(jax.block_until_ready(compiled(*arguments)))


class BodyRun:
    """A body that a variant runs, and its known values.

    Args:
        executor: Runs the body.
        body: The body.
        arguments: Its arguments.
    """

    def __init__(self, executor: Executor, body: ClosedJaxpr, arguments: Sequence[Any]):
        self.executor, self.body = executor, body
        jaxpr = jaxcompat.open_jaxpr(body)
        self.jaxpr: Jaxpr = jaxpr
        self._given: dict[Var, Any] = dict(zip(jaxpr.constvars, body.consts, strict=True))
        self._given.update(zip(jaxpr.invars, arguments, strict=True))
        self._values = dict(self._given)
        self.definitions = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def compute(self, wanted: Iterable[Atom]) -> None:
        """Compute values as one piece from the known ones."""
        missing = [v for v in dict.fromkeys(variables(wanted)) if v not in self._values]
        if missing:
            eqns = needed(self.jaxpr, missing, self._values)
            free = list(free_variables(eqns, missing))
            piece = jaxcompat.new_jaxpr((), (), free, missing, eqns, _DEBUG)
            values = self.executor.run(piece, [self._values[v] for v in free])
            self._values.update(zip(missing, values, strict=True))

    def value(self, atom: Atom) -> Any:
        """Return a known value."""
        return as_array(atom.val) if isinstance(atom, Literal) else self._values[atom]

    def values(self, atoms: Sequence[Atom]) -> list[Any]:
        """Return values, after computing the unknown ones."""
        self.compute(atoms)
        return list(map(self.value, atoms))

    def evict(self, keep: Iterable[Var]) -> None:
        """Drop all values but the arguments of the body and `keep`."""
        kept = {v: self._values[v] for v in keep if v in self._values}
        self._values = {**self._given, **kept}


def needed(jaxpr: Jaxpr, wanted: Iterable[Var], known: Collection[Var]) -> list[JaxprEqn]:
    """Return the equations that compute some variables from known ones.

    The contents of refs are unknown: all earlier equations that access a ref are included.
    """
    needs, refs = set(wanted), set[Var]()
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        operands = variables(eqn.invars)
        if needs.isdisjoint(eqn.outvars) and refs.isdisjoint(operands):
            continue
        eqns.append(eqn)
        for var in operands:
            if isinstance(var.aval, AbstractRef):
                refs.add(var)
                needs.add(var)
            elif var not in known:
                needs.add(var)
    return eqns[::-1]
