"""The memory that a kernel needs besides its operands and results: an open table of rules.

    @rule("memory", "my_primitive")
    def _(eqn):
        return Workspace(2 * size_in_bytes(eqn.outvars[0].aval))

A primitive needs a rule if XLA expands it, or calls a library that has buffers of its own, and JAX
does not lower it to other primitives (`ir.rewriting.expansions`). The sizes here are those of XLA
on the CPU. A primitive about which neither the traits nor this table say anything is unknown: its
operands and results count, and the estimate names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.dtypes import itemsize
from jaxprtool.ir.basics.rules import RuleTable, rule
from jaxprtool.ir.core.equations import size_in_bytes
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import JaxprEqn


@dataclass(frozen=True)
class Workspace:
    """What a kernel needs besides its operands and results.

    Attributes:
        bytes: The bytes of its working memory.
        in_place: Whether it may write a result to the memory of an operand that it reads last.
        by_columns: Whether its matrices are stored by columns, as LAPACK has them. XLA copies those
            that are arguments or results of the program, which are stored by rows.
        not_counted: The primitive, and what of its memory is not counted; "" if all is.
    """

    bytes: int = 0
    in_place: bool = False
    by_columns: bool = False
    not_counted: str = ""


NOTHING = Workspace()

#: A function that returns the workspace of an equation, or None if it is unknown.
WorkspaceRule = Callable[[JaxprEqn], Workspace | None]

workspace_rules: RuleTable[WorkspaceRule] = RuleTable()


def workspace(eqn: JaxprEqn) -> Workspace | None:
    """Return the workspace of an equation without regions, or None if it is unknown."""
    found = workspace_rules.get(eqn.primitive.name)
    if found is not None:
        return found(eqn)
    like = traits(eqn)
    if like.floats_of_complex and _is_complex(eqn):
        count = math.prod(_shape(eqn.outvars[0]))
        size = itemsize(eqn.invars[0].aval.dtype) // 2
        return Workspace(count * (like.floats_of_complex * size + 1))
    is_known = like.moves or like.updates or like.gives or like.elementwise or like.names_value
    return NOTHING if is_known or like.collective or like.callback else None


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_complex(eqn: JaxprEqn) -> bool:
    return bool(np.issubdtype(eqn.invars[0].aval.dtype, np.complexfloating))


def _matrices(eqn: JaxprEqn, rows: int, columns: int, more_bytes: int = 0) -> int:
    """Return the bytes of a matrix for each of the matrices that the first operand has."""
    batch, dtype = math.prod(_shape(eqn.invars[0])[:-2]), eqn.invars[0].aval.dtype
    return int(batch * (rows * columns * itemsize(dtype) + more_bytes))


# --- nothing --------------------------------------------------------------------------------------


@rule(workspace_rules, "after_all", "axis_index", "check", "create_linear", "create_token")
@rule(workspace_rules, "dce_sink", "device_put", "dim_as_value", "dimension_size")
@rule(workspace_rules, "empty", "empty2", "fft", "from_edtype", "inspect_sharding")
@rule(workspace_rules, "layout_constraint", "multiple_of", "pin", "rng_bit_generator")
@rule(workspace_rules, "platform_index", "reduce", "reduce_and", "reduce_max", "reduce_min")
@rule(workspace_rules, "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor", "relayout")
@rule(workspace_rules, "logical_array", "physical_array", "random_fold_in", "random_seed")
@rule(workspace_rules, "reciprocal", "reshard", "shape_assertion", "stage", "to_edtype", "unpin")
@rule(workspace_rules, "unreachable", "with_memory_space_constraint", "xla_metadata_value")
@rule(workspace_rules, "get", "swap", "addupdate", "new_ref", "empty_ref", "free_ref", "freeze")
@rule(workspace_rules, "argmax", "argmin")
def _nothing(eqn: JaxprEqn) -> Workspace:
    return NOTHING


@rule(workspace_rules, "lgamma")
def _lgamma(eqn: JaxprEqn) -> Workspace | None:
    """Return None where XLA writes none to 13 of the coefficients that `lgamma` looks up."""
    return None if jaxcompat.lgamma_reads_tables() else NOTHING


# --- random bits ----------------------------------------------------------------------------------


@rule(workspace_rules, "random_bits", "random_split", "threefry2x32", "rng_uniform")
def _random_words(eqn: JaxprEqn) -> Workspace:
    """Count three arrays of Threefry's words."""
    words = sum(math.prod(_shape(var)) for var in eqn.outvars) // len(eqn.outvars)
    return Workspace(3 * 4 * words)


# --- products and windows -------------------------------------------------------------------------


def _widened(eqn: JaxprEqn) -> str:
    """Return what is not counted if XLA for the CPU copies small floats to f32 for a product.

    XLA for accelerators multiplies them as they are, so these copies are named, not counted.
    """
    dtypes = (v.aval.dtype for v in (*eqn.invars, *eqn.outvars))
    small = [d.name for d in dtypes if jnp.issubdtype(d, jnp.floating) and itemsize(d) < 4]
    return f"{eqn.primitive.name} of {small[0]} on the CPU" if small else ""


@rule(workspace_rules, "dot_general")
def _product(eqn: JaxprEqn) -> Workspace:
    ((left, right), (batch, other)), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    sizes = [v.aval.ndim - len(batch) for v in eqn.invars]
    rows_by_columns = (*left, *right) == (eqn.invars[0].aval.ndim - 1, len(batch))
    plain = rows_by_columns and sizes == [2, 2] and batch == other == tuple(range(len(batch)))
    bf16 = all(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
    as_they_are = plain and bf16 and (out.dtype == jnp.float32 or jaxcompat.keeps_bfloat16())
    return Workspace(not_counted="" if as_they_are else _widened(eqn))


@rule(workspace_rules, "conv_general_dilated")
def _convolution(eqn: JaxprEqn) -> Workspace:
    """Count the result with its features on the last axis, if it has them on another."""
    out, spec = eqn.outvars[0].aval, eqn.params["dimension_numbers"].out_spec
    batch, feature, *space = spec
    long = [axis for axis in (batch, *space, feature) if out.shape[axis] != 1]
    copied = 0 if long == sorted(long) else size_in_bytes(out)
    return Workspace(copied, not_counted=_widened(eqn))


#: XLA sums at most this many elements of a window in one step of a cumulative sum.
_BLOCK = 16


@rule(workspace_rules, "reduce_window_sum", "reduce_window_max", "reduce_window_min")
@rule(workspace_rules, "reduce_window")
def _reduce_window(eqn: JaxprEqn) -> Workspace:
    """Count the sums of blocks if the window is as long as an axis: a cumulative reduction."""
    shape, window = _shape(eqn.invars[0]), eqn.params["window_dimensions"]
    long = [n for n, size in zip(window, shape, strict=True) if n > 1 and n >= size]
    if len(long) != 1 or math.prod(window) != long[0] or long[0] <= _BLOCK:
        return NOTHING
    sizes = sum(size_in_bytes(var.aval) for var in eqn.outvars)
    return Workspace(int(sizes * (1 + 1 / _BLOCK)))


@rule(workspace_rules, "select_and_scatter")
def _select_and_scatter(eqn: JaxprEqn) -> Workspace:
    """Count the index of each element on each axis, and that of the one selected in each window."""
    operand, source = eqn.invars[:2]
    rank, count = len(_shape(operand)), math.prod(_shape(source))
    indices = 4 * rank * (math.prod(_shape(operand)) + count)
    return Workspace(indices + count * itemsize(operand.aval.dtype))


@rule(workspace_rules, "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul")
@rule(workspace_rules, "scatter-sub")
def _scatter(eqn: JaxprEqn) -> Workspace:
    """Count the indices that XLA completes by those of batch axes, and another layout of them."""
    indices, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    batched = len(numbers.operand_batching_dims)
    width = batched + len(numbers.scatter_dims_to_operand_dims)
    count = math.prod(indices.shape[:-1])
    return Workspace(2 * bool(batched) * count * width * itemsize(indices.dtype))


# --- sorts ----------------------------------------------------------------------------------------


@rule(workspace_rules, "sort")
def _sort(eqn: JaxprEqn) -> Workspace:
    return Workspace(in_place=True)


@rule(workspace_rules, "top_k", "approx_top_k")
def _top_k(eqn: JaxprEqn) -> Workspace:
    """Count a sorted copy of the operand and its positions; XLA has a kernel for f32 alone."""
    operand = eqn.invars[0].aval
    dimension = eqn.params.get("reduction_dimension", -1) % operand.ndim
    if operand.dtype == np.float32 and dimension == operand.ndim - 1:
        return NOTHING
    return Workspace(size_in_bytes(operand) + 4 * math.prod(operand.shape))


# --- linear algebra -------------------------------------------------------------------------------


@rule(workspace_rules, "cholesky", "householder_product", "triangular_solve", "geqrf", "lu")
@rule(workspace_rules, "eigh", "geqp3", "ormqr", "hessenberg", "tridiagonal")
def _in_place(eqn: JaxprEqn) -> Workspace:
    return Workspace(in_place=True, by_columns=True)


@rule(workspace_rules, "svd")
def _svd(eqn: JaxprEqn) -> Workspace:
    """Count LAPACK's copy of the matrix, and the singular vectors if they are not results."""
    *_, m, n = _shape(eqn.invars[0])
    vectors = m * m + n * n if eqn.params["full_matrices"] else min(m, n) * (m + n)
    vectors *= not eqn.params["compute_uv"]
    return Workspace(_matrices(eqn, m, n) + _matrices(eqn, 1, vectors), by_columns=True)


@rule(workspace_rules, "eig")
def _eig(eqn: JaxprEqn) -> Workspace:
    """Count LAPACK's copy of the matrix, and the eigenvectors that are not results."""
    *_, n, _ = _shape(eqn.invars[0])
    results = 1 + eqn.params["compute_left_eigenvectors"] + eqn.params["compute_right_eigenvectors"]
    size = itemsize(eqn.outvars[0].aval.dtype)
    return Workspace(_matrices(eqn, n, n, (3 - results) * n * n * size), by_columns=True)


@rule(workspace_rules, "schur")
def _schur(eqn: JaxprEqn) -> Workspace:
    *_, n, _ = _shape(eqn.invars[0])
    hidden = 0 if eqn.params["compute_schur_vectors"] else 1
    return Workspace(_matrices(eqn, n, n) * hidden, in_place=True, by_columns=True)


@rule(workspace_rules, "tridiagonal_solve")
def _tridiagonal_solve(eqn: JaxprEqn) -> Workspace:
    """Count LAPACK's copies of the three diagonals and of the right-hand sides."""
    return Workspace(sum(size_in_bytes(v.aval) for v in eqn.invars))
