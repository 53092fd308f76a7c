"""Find the matrix products that can run at the same time as a collective.

They are in the same function of the compiled module, and neither need the collective's result nor
compute what it needs. On a GPU or TPU, collectives can run in the background; XLA for the CPU runs
one operation after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from jaxprtool.ir.hlo.collectives import collectives
from jaxprtool.ir.hlo.module import Computation, Module
from jaxprtool.ir.hlo.products import flops_of


def independent_products(module: Module) -> dict[str, Counter[str]]:
    """Return the FLOPs of the independent products of each collective.

    Args:
        module: A compiled module.

    Returns:
        The FLOPs in one run of the collective's function by element type, by the collective's name.
    """
    wanted = {each.instruction.id for each in collectives(module)}
    found: dict[str, Counter[str]] = {}
    for computation in module.computations.values():
        if any(each.id in wanted for each in computation.instructions):
            found |= _in(module, computation, wanted)
    return found


def _in(module: Module, computation: Computation, wanted: set[int]) -> dict[str, Counter[str]]:
    """Return the FLOPs of independent products for the collectives in one function.

    A set of products is an integer with a bit for each, so that unions are fast.
    """
    products: list[tuple[int, Counter[str]]] = []
    before: dict[int, int] = {}
    for each in computation.instructions:  # operands come first
        bits = 0
        for operand in each.operands:
            bits |= before.get(operand, 0)
        if flops := flops_of(module, each):
            bits |= 1 << len(products)
            products.append((each.id, flops))
        before[each.id] = bits
    after = _read_later(computation, {number: 1 << i for i, (number, _) in enumerate(products)})
    dtypes = {dtype for _, flops in products for dtype in flops}
    counts = {dtype: np.array([flops[dtype] for _, flops in products]) for dtype in dtypes}
    found = {}
    for each in computation.instructions:
        if each.id in wanted:
            free = ~_chosen(before[each.id] | after.get(each.id, 0), len(products))
            sums = {dtype: int(flops[free].sum()) for dtype, flops in counts.items()}
            found[each.name] = +Counter(sums)
    return found


def _chosen(bits: int, count: int) -> np.ndarray:
    """Return which of the first bits of a number are set."""
    data = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), np.uint8)
    return np.unpackbits(data, count=count, bitorder="little").astype(bool)


def _read_later(computation: Computation, bits: Mapping[int, int]) -> dict[int, int]:
    """Return the products that depend on each instruction."""
    after: dict[int, int] = {}
    for each in reversed(computation.instructions):
        reached = after.get(each.id, 0) | bits.get(each.id, 0)
        for operand in each.operands:
            after[operand] = after.get(operand, 0) | reached
    return after
