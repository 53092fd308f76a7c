"""Check the indices that a program promises to be in bounds, by `PROMISE_IN_BOUNDS`.

JAX's tests are written for fixed sizes. With symbols, their promises may be false at small sizes,
where their results are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from jaxprtool.ir.specialization import specialized
from tests.programs.interpreter import evaluate
from tests.programs.stepwise import interpret
from tests.programs.symbolic import Sizes

#: The outcome for a program at sizes that break its promise.
NOT_AS_PROMISED = "not as promised: indices out of bounds"


def keeps_promises(program: Program, sizes: Sizes, args: Sequence[Any]) -> bool:
    """Return True if all indices that a program promises to be in bounds are so, at some sizes."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    if not any(map(_promises, eqns)):
        return True
    kept = []

    def apply(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if _promises(eqn):
            kept.append(_within(eqn, operands))
        return interpret(eqn, operands)

    evaluate(specialized(program.jaxpr, sizes), args, apply)
    return all(kept)


def _promises(eqn: Any) -> bool:
    return bool(eqn.params.get("mode") == GatherScatterMode.PROMISE_IN_BOUNDS)


def _within(eqn: Any, operands: Sequence[Any]) -> bool:
    """Return True if the slices that a gather reads, or a scatter updates, are all in bounds."""
    numbers, shape = eqn.params["dimension_numbers"], np.shape(operands[0])
    if isinstance(numbers, GatherDimensionNumbers):
        axes, sizes = numbers.start_index_map, eqn.params["slice_sizes"]
    else:
        assert isinstance(numbers, ScatterDimensionNumbers), numbers
        axes, sizes = numbers.scatter_dims_to_operand_dims, _window(numbers, operands)
    last = [shape[axis] - sizes[axis] for axis in axes]
    starts = np.asarray(operands[1]).astype(np.int64)
    return bool(np.all((starts >= 0) & (starts <= last)))


def _window(numbers: ScatterDimensionNumbers, operands: Sequence[Any]) -> list[int]:
    """Return the size of the slices that a scatter updates, along each axis of its operand."""
    alone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(np.shape(operands[2])[axis] for axis in numbers.update_window_dims)
    return [1 if axis in alone else next(sizes) for axis in range(np.ndim(operands[0]))]
