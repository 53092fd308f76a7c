"""The cost of one equation: its quantities, trip counts, and an open table of rules.

If sizes are symbolic, so are the quantities: `2*n**2*d`, as in the types of the jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.analysis.devices import ANY_UNIT
from jaxprtool.ir.documents import Number
from jaxprtool.ir.equations import equations, size_in_bytes
from jaxprtool.ir.regions import Regions, While
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal

# --- work -----------------------------------------------------------------------------------------
# The quantities that a cost consists of: FLOPs, bytes and so on.


class Work(NamedTuple):
    """The cost of one or more equations.

    Attributes:
        flops: Arithmetic operations on numbers of any dtype; a multiply-add is two.
        transcendentals: Exponentials, logarithms, square roots and so on. They are not in `flops`.
        bytes_read: Bytes read from memory.
        bytes_written: Bytes written to memory.
        random_numbers: Random numbers drawn, or words of random bits.
        bytes_communicated: Bytes that a device sends in collectives.
    """

    flops: Number = 0
    transcendentals: Number = 0
    bytes_read: Number = 0
    bytes_written: Number = 0
    random_numbers: Number = 0
    bytes_communicated: Number = 0

    @property
    def bytes(self) -> Any:
        """The bytes read and written."""
        return self.bytes_read + self.bytes_written

    def times(self, count: Any) -> Work:
        """Return the cost of `count` runs, or on `count` devices."""
        return self if count == 1 else self.map(lambda number: number * count)

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return total((self, other))

    def map(self, function: Callable[[Any], Any]) -> Work:
        """Apply a function to each quantity."""
        return Work(*map(function, self))


NOTHING = Work()


def total(works: Iterable[Work]) -> Work:
    """Return the sum of costs."""
    return Work(*map(sum, zip(*works, strict=True)))


def maximum_work(works: Iterable[Work]) -> Work:
    """Return the maximum of each quantity."""
    return _reduced(works, jax.core.max_dim)


def minimum_work(works: Iterable[Work]) -> Work:
    """Return the minimum of each quantity."""
    return _reduced(works, jax.core.min_dim)


def _reduced(works: Iterable[Work], symbolic: Callable[[Any, Any], Any]) -> Work:
    first, *others = works
    for work in others:
        first = Work(*map(symbolic, first, work))
    return first


def count(shape: Iterable[Any]) -> Any:
    """Return the number of elements of an array of a shape."""
    return math.prod(shape)


def is_concrete_size(value: Any) -> bool:
    """Return True if a size is a number, not symbolic."""
    return not jaxcompat.is_symbolic_dimension(value)


# --- rules ----------------------------------------------------------------------------------------
# The cost of each primitive: an open table of rules.
#
#     @rule("cost", "my_primitive")
#     def _(eqn):
#         return Work(flops=2 * eqn.outvars[0].aval.size)
#
# A rule returns the cost of one run of an equation. Operations are counted as XLA counts them
# before it optimizes (`jax.stages.Lowered.cost_analysis`): an elementwise operation is one FLOP or
# one transcendental per element, on integers and booleans too. Bytes are added later, from the
# fusion of equations; a rule returns them only if its primitive reads or writes a part of an array.

#: A function that returns the cost of one run of an equation, or None if unknown.
CostRule = Callable[[JaxprEqn], Work | None]

cost_rules: RuleTable[CostRule] = RuleTable()


def work_of(eqn: JaxprEqn) -> Work | None:
    """Return the cost of one run of an equation without its bodies, or None if unknown.

    A primitive without a rule in the table gets that of `jax.experimental.roofline`.
    """
    rule = cost_rules.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn)
    like = traits(eqn)
    if like.moves or like.gives in ("same", "layout"):
        return NOTHING
    if like.elementwise:
        return Work(flops=_results(eqn))
    flops = jaxcompat.roofline_flops(eqn)
    return None if flops is None else Work(flops=flops)


def product_of(eqn: JaxprEqn) -> str:
    """Return the precision of a matrix product, for which devices have a rate; "" for others.

    This is the dtype, `bf16`, with the word `highest` if the product asks for full precision. It is
    `ANY_UNIT` for an equation that may run on any unit.
    """
    like = traits(eqn)
    if like.opaque:
        return ANY_UNIT
    if not like.expensive or like.draws:
        return ""
    name = str(eqn.invars[0].aval.str_short(short_dtypes=True)).partition("[")[0]
    # A complex product consists of real ones.
    name = {"c64": "f32", "c128": "f64"}.get(name, name)
    precision = eqn.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return f"{name} highest" if lax.Precision.HIGHEST in both else name


def _shape(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value.aval, "shape", ()))


def _results(eqn: JaxprEqn) -> Any:
    """Return the number of elements of the first result."""
    return count(_shape(eqn.outvars[0]))


def _is_complex(value: Any) -> bool:
    return getattr(value.aval, "dtype", None) in (np.complex64, np.complex128)


# --- element by element ---------------------------------------------------------------------------


@rule(cost_rules, "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh")
@rule(cost_rules, "bessel_i0e", "bessel_i1e", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2")
@rule(cost_rules, "expm1", "igamma", "igamma_grad_a", "igammac", "lgamma", "log", "log1p", "log2")
@rule(cost_rules, "logistic", "polygamma", "pow", "regularized_incomplete_beta", "rsqrt", "sin")
@rule(cost_rules, "sinh", "sqrt", "tan", "tanh", "zeta", "random_gamma", "random_gamma_grad")
def _transcendental(eqn: JaxprEqn) -> Work:
    return Work(transcendentals=_results(eqn))


@rule(cost_rules, "mul", "square")
def _product_of_numbers(eqn: JaxprEqn) -> Work:
    return Work(flops=_results(eqn) * (6 if _is_complex(eqn.outvars[0]) else 1))


@rule(cost_rules, "add", "add_any", "sub")
def _sum_of_numbers(eqn: JaxprEqn) -> Work:
    return Work(flops=_results(eqn) * (2 if _is_complex(eqn.outvars[0]) else 1))


@rule(cost_rules, "integer_pow")
def _integer_pow(eqn: JaxprEqn) -> Work:
    """Count repeated squaring, and a division if the exponent is negative."""
    exponent = eqn.params["y"]
    products = max(abs(exponent).bit_length() - 2 + abs(exponent).bit_count(), 0)
    return Work(flops=_results(eqn) * (products + (exponent < 0)))


@rule(cost_rules, "clamp")
def _clamp(eqn: JaxprEqn) -> Work:
    return Work(flops=2 * _results(eqn))


@rule(cost_rules, "copy", "copy_p", "device_put", "name", "optimization_barrier", "stop_gradient")
@rule(cost_rules, "tie", "pin", "unpin", "sharding_constraint", "reshard", "layout_constraint")
@rule(cost_rules, "axis_index", "dim_as_value", "create_token", "after_all", "empty", "random_seed")
@rule(cost_rules, "debug_callback", "debug_print", "io_callback", "inspect_sharding", "sow")
@rule(cost_rules, "variable", "empty_ref", "new_ref", "free_ref", "freeze", "platform_index")
@rule(cost_rules, "empty2", "zeros_like", "get", "swap", "program_id", "num_programs")
@rule(cost_rules, "multiple_of", "max_contiguous", "masked_load", "masked_swap", "delay")
@rule(
    cost_rules, "semaphore_read", "semaphore_signal", "semaphore_wait", "dma_wait", "debug_barrier"
)
@rule(cost_rules, "get_barrier_semaphore", "prng_seed", "roll", "bitcast", "add_dependency")
def _no_arithmetic(eqn: JaxprEqn) -> Work:
    return NOTHING


# --- products -------------------------------------------------------------------------------------


@rule(cost_rules, "dot_general")
def _dot_general(eqn: JaxprEqn) -> Work:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = _shape(eqn.invars[0])
    return _multiply_adds(eqn, _results(eqn) * count(left[axis] for axis in contracted))


@rule(cost_rules, "ragged_dot_general")
def _ragged_dot_general(eqn: JaxprEqn) -> Work:
    """Count one group per row: a row is multiplied by the matrix of its group, or summed in it."""
    (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    left, numbers = _shape(eqn.invars[0]), eqn.params["ragged_dot_dimension_numbers"]
    sums_groups = set(numbers.lhs_ragged_dimensions) & set(contracted)
    groups = _shape(eqn.invars[2])[-1] if sums_groups else 1
    return _multiply_adds(eqn, _results(eqn) // groups * count(left[axis] for axis in contracted))


def _multiply_adds(eqn: JaxprEqn, number: Any) -> Work:
    """Count 2 FLOPs for a real multiply-add, and 8 for a complex one."""
    return Work(flops=number * (8 if _is_complex(eqn.outvars[0]) else 2))


@rule(cost_rules, "conv_general_dilated")
def _convolution(eqn: JaxprEqn) -> Work:
    """Count no products with padding or with the zeros of dilation."""
    params = eqn.params
    x, kernel = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    of_x, of_kernel, of_result = params["dimension_numbers"]
    result = _shape(eqn.outvars[0])
    number = result[of_result[0]] * result[of_result[1]] * kernel[of_kernel[1]]
    for i, j, k, stride, padding, dilation, spread in zip(
        of_x[2:],
        of_kernel[2:],
        of_result[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    ):
        number *= multiplied_pairs(x[i], kernel[j], result[k], stride, padding[0], dilation, spread)
    return _multiply_adds(eqn, number)


def multiplied_pairs(
    size: Any, window: Any, windows: Any, stride: int, low: Any, dilation: int, spread: int
) -> Any:
    """Return how many pairs of an element and a window position are multiplied along an axis."""
    sizes = size, window, windows, low
    if not all(map(is_concrete_size, sizes)) or not all(sizes[:3]):
        return window * windows
    # `at` is the position in the dilated array of each place in each window. Count those that are
    # an element of the array, and not padding or a zero of dilation.
    place = np.arange(window)[:, None] * spread - low
    at = place + np.arange(windows) * stride
    return int(((at >= 0) & (at < (size - 1) * dilation + 1) & (at % dilation == 0)).sum())


# --- sums, sorts and the like ---------------------------------------------------------------------


@rule(cost_rules, "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and")
@rule(cost_rules, "reduce_or", "reduce_xor", "argmax", "argmin")
def _reduction(eqn: JaxprEqn) -> Work:
    left = count(_shape(eqn.invars[0])) - _results(eqn)
    return Work(flops=left if not is_concrete_size(left) or left > 0 else 0)


@rule(cost_rules, "reduce")
def _reduction_by(eqn: JaxprEqn) -> Work:
    left = count(_shape(eqn.invars[0])) - _results(eqn)
    return _arithmetic_of(eqn.params["jaxpr"]).times(left)


def _arithmetic_of(jaxpr: Any) -> Work:
    """Return the cost of a body that works on single elements."""
    works = (work_of(eqn) for eqn in equations(jaxcompat.open_jaxpr(jaxpr)))
    return sum((work for work in works if work is not None), NOTHING)


@rule(cost_rules, "cumsum", "cumprod", "cummax", "cummin")
def _cumulative(eqn: JaxprEqn) -> Work:
    return Work(flops=_results(eqn))


@rule(cost_rules, "cumlogsumexp")
def _cumlogsumexp(eqn: JaxprEqn) -> Work:
    number = _results(eqn)
    return Work(flops=3 * number, transcendentals=2 * number)


@rule(cost_rules, "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
@rule(cost_rules, "select_and_gather_add")
def _window(eqn: JaxprEqn) -> Work:
    window = count(eqn.params["window_dimensions"])
    return Work(flops=_results(eqn) * (window - 1))


@rule(cost_rules, "select_and_scatter", "select_and_scatter_add")
def _scatter_to_window(eqn: JaxprEqn) -> Work:
    window, windows = eqn.params["window_dimensions"], _shape(eqn.invars[0])
    return Work(flops=count(windows) * count(window))


@rule(cost_rules, "sort", "top_k", "approx_top_k")
def _sort(eqn: JaxprEqn) -> Work | None:
    """Count n log2(n) comparisons for n elements."""
    shape = _shape(eqn.invars[0])
    axis = eqn.params.get("dimension", eqn.params.get("reduction_dimension", -1))
    length = shape[axis] if shape else 1
    return Work(flops=count(shape) * binary_logarithm(length)) if is_concrete_size(length) else None


def binary_logarithm(number: int) -> int:
    """Return the logarithm to base 2, rounded up."""
    return max(number - 1, 0).bit_length()


# --- parts of arrays ------------------------------------------------------------------------------


@rule(cost_rules, "slice", "dynamic_slice", "gather", "split")
def _part(eqn: JaxprEqn) -> Work:
    """Count the bytes of the part and of the indices: nothing else is read."""
    part = sum(size_in_bytes(v.aval) for v in eqn.outvars)
    return Work(bytes_read=part + sum(size_in_bytes(v.aval) for v in eqn.invars[1:]))


@rule(cost_rules, "dynamic_update_slice")
def _update(eqn: JaxprEqn) -> Work:
    """Count the bytes of the part, which is written in place."""
    part = size_in_bytes(eqn.invars[1].aval)
    return Work(bytes_read=part, bytes_written=part)


@rule(cost_rules, "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul")
@rule(cost_rules, "scatter-sub")
def _scatter(eqn: JaxprEqn) -> Work:
    """Count the bytes of the updates and indices, and of the old elements unless replaced."""
    indices, updates = (v.aval for v in eqn.invars[1:])
    part = size_in_bytes(updates)
    body = eqn.params["update_jaxpr"]
    work = NOTHING if body is None else _arithmetic_of(body).times(count(updates.shape))
    read = part if work == NOTHING else 2 * part
    return work + Work(bytes_read=read + size_in_bytes(indices), bytes_written=part)


# --- linear algebra -------------------------------------------------------------------------------
#
# The leading terms of the textbooks' counts. Complex operations count four. A factor that nothing
# reads, whose variable is a `DropVar`, is not counted.
#
# GVL: G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th edition, 2013.
# LAWN 41: S. Blackford and J. Dongarra, "Installation Guide for LAPACK", LAPACK Working Note 41,
# 1999, appendix C.
# LUG: E. Anderson et al., "LAPACK Users' Guide", 3rd edition, 1999, chapter 3.


def _matrices(value: Any) -> tuple[Any, Any, Any]:
    """Return the number of matrices in an array, and their rows and columns."""
    *batch, rows, columns = _shape(value)
    return count(batch), rows, columns


def _factored(eqn: JaxprEqn, flops: Any, thirds: Any = 0) -> Work:
    """Return the cost of an algorithm on each matrix of the first operand.

    Args:
        eqn: The equation.
        flops: The real FLOPs for a matrix.
        thirds: Thirds of FLOPs to add to them.
    """
    number, _, _ = _matrices(eqn.invars[0])
    number *= 4 if _is_complex(eqn.invars[0]) else 1
    thirds *= number
    return Work(flops=number * flops + (thirds + 1 if is_concrete_size(thirds) else thirds) // 3)


def _is_read(eqn: JaxprEqn, result: int) -> bool:
    return len(eqn.outvars) > result and type(eqn.outvars[result]) is not DropVar


@rule(cost_rules, "cholesky")
def _cholesky(eqn: JaxprEqn) -> Work:
    """Count n^3/3 (GVL 4.2)."""
    _, n, _ = _matrices(eqn.invars[0])
    return _factored(eqn, 0, n**3)


@rule(cost_rules, "cholesky_update")
def _cholesky_update(eqn: JaxprEqn) -> Work:
    """Count n Givens rotations of n, n - 1, … pairs, at 6 FLOPs for each pair (GVL 5.1, 6.5)."""
    _, n, _ = _matrices(eqn.invars[0])
    return _factored(eqn, 3 * n**2)


@rule(cost_rules, "lu")
def _lu(eqn: JaxprEqn) -> Work:
    """Count m n^2 - n^3/3 if m >= n (GVL 3.2), and as xGETRF of LAWN 41 otherwise."""
    _, rows, columns = _matrices(eqn.invars[0])
    steps = jax.core.min_dim(rows, columns)
    return _factored(eqn, 2 * rows * columns * steps - (rows + columns) * steps**2, 2 * steps**3)


@rule(cost_rules, "lu_pivots_to_permutation")
def _lu_pivots_to_permutation(eqn: JaxprEqn) -> Work:
    return NOTHING


def _reflections(rows: Any, columns: Any, steps: Any) -> tuple[Any, Any]:
    """Return the FLOPs, and thirds, of Householder reflections of ever smaller matrices.

    These are the counts of xGEQRF and xORGQR in LAWN 41, for the factor R and for Q. If m >= n,
    they are 2 n^2 (m - n/3) for R, the same for the first n columns of Q, and
    4 (m^2 n - m n^2 + n^3/3) for all of Q (GVL 5.2).
    """
    return 4 * rows * columns * steps - 2 * (rows + columns) * steps**2, 4 * steps**3


@rule(cost_rules, "geqrf", "geqp3")
def _reflectors(eqn: JaxprEqn) -> Work:
    """Count the factor R. Column pivoting adds a lower order (GVL 5.4)."""
    _, rows, columns = _matrices(eqn.invars[0])
    return _factored(eqn, *_reflections(rows, columns, jax.core.min_dim(rows, columns)))


@rule(cost_rules, "qr")
def _qr(eqn: JaxprEqn) -> Work:
    """Count the factor R, and Q if it is read."""
    _, rows, columns = _matrices(eqn.invars[0])
    steps = jax.core.min_dim(rows, columns)
    flops, thirds = _reflections(rows, columns, steps)
    if _is_read(eqn, 0):
        more, more_thirds = _reflections(rows, _shape(eqn.outvars[0])[-1], steps)
        flops, thirds = flops + more, thirds + more_thirds
    return _factored(eqn, flops, thirds)


@rule(cost_rules, "householder_product")
def _householder_product(eqn: JaxprEqn) -> Work:
    _, rows, columns = _matrices(eqn.invars[0])
    return _factored(eqn, *_reflections(rows, columns, _shape(eqn.invars[1])[-1]))


@rule(cost_rules, "ormqr")
def _ormqr(eqn: JaxprEqn) -> Work:
    """Count 4 m n k - 2 n k^2 for k reflectors of m, m - 1, … elements (xORMQR of LAWN 41)."""
    _, rows, columns = _matrices(eqn.outvars[0])
    m, n = (rows, columns) if eqn.params["left"] else (columns, rows)
    k = _shape(eqn.invars[1])[-1]
    return _factored(eqn, 4 * m * n * k - 2 * n * k**2)


@rule(cost_rules, "svd")
def _svd(eqn: JaxprEqn) -> Work | None:
    """Count as the table in GVL 8.6 does: values by Golub and Reinsch, vectors by the R-SVD.

    A subset of the vectors is transformed back from the bidiagonal form, at 2 m n for each
    (xORMBR of LAWN 41).
    """
    if not _is_direct(eqn.params.get("algorithm")):
        return None
    _, rows, columns = _matrices(eqn.invars[0])
    m, n = jax.core.max_dim(rows, columns), jax.core.min_dim(rows, columns)
    values = 4 * m * n**2, -4 * n**3
    sides = [_is_read(eqn, 1), _is_read(eqn, 2)]
    if not any(sides):
        return _factored(eqn, *values)
    subset = _shape(eqn.outvars[0])[-1]
    if subset != n:
        return _factored(eqn, values[0] + 2 * m * n * subset * sum(sides), values[1])
    of_m, of_n = sides[::-1] if is_concrete_size(rows + columns) and rows < columns else sides
    if not of_m or (rows == columns and not of_n):
        return _factored(eqn, 2 * m * n**2 + 11 * n**3)
    of_values = 4 * m**2 * n + 2 * n**3 if eqn.params["full_matrices"] else 6 * m * n**2
    return _factored(eqn, of_values + (20 if of_n else 11) * n**3)


def _is_direct(algorithm: Any) -> bool:
    """Return False if an algorithm iterates on whole matrices, as often as their values need.

    Those of Jacobi, and with polar decompositions (QDWH), do.
    """
    return algorithm is None or algorithm.name not in ("JACOBI", "POLAR", "QDWH")


@rule(cost_rules, "eigh")
def _eigh(eqn: JaxprEqn) -> Work | None:
    """Count 4 n^3/3 for the values, and 9 n^3 with the vectors (GVL 8.3).

    A subset of the vectors is transformed back from the tridiagonal form, at 2 n^2 for each
    (xORMTR of LAWN 41).
    """
    if not _is_direct(eqn.params.get("algorithm")):
        return None
    _, n, _ = _matrices(eqn.invars[0])
    subset = _shape(eqn.outvars[1])[-1]
    if not _is_read(eqn, 0):
        return _factored(eqn, 0, 4 * n**3)
    return _factored(eqn, 9 * n**3) if subset == n else _factored(eqn, 2 * n**2 * subset, 4 * n**3)


@rule(cost_rules, "eig")
def _eig(eqn: JaxprEqn) -> Work:
    """Count 10 n^3 for the values, or 25 n^3 for the Schur form (GVL 7.5) and 4 n^3/3 a side.

    With the vectors of one side these are the 26.33 n^3 of LUG.
    """
    _, n, _ = _matrices(eqn.invars[0])
    sides = _is_read(eqn, 1) + _is_read(eqn, 2)
    return _factored(eqn, (25 if sides else 10) * n**3, 4 * sides * n**3)


@rule(cost_rules, "schur")
def _schur(eqn: JaxprEqn) -> Work:
    """Count 25 n^3 with the Schur vectors, and without them the 10 n^3 of the values (GVL 7.5)."""
    _, n, _ = _matrices(eqn.invars[0])
    return _factored(eqn, (25 if _is_read(eqn, 1) else 10) * n**3)


@rule(cost_rules, "hessenberg")
def _hessenberg(eqn: JaxprEqn) -> Work:
    """Count 10 n^3/3, without the orthogonal factor (GVL 7.4)."""
    _, n, _ = _matrices(eqn.invars[0])
    return _factored(eqn, 0, 10 * n**3)


@rule(cost_rules, "tridiagonal")
def _tridiagonal(eqn: JaxprEqn) -> Work:
    """Count 4 n^3/3, without the orthogonal factor (GVL 8.3)."""
    _, n, _ = _matrices(eqn.invars[0])
    return _factored(eqn, 0, 4 * n**3)


@rule(cost_rules, "symmetric_product")
def _symmetric_product(eqn: JaxprEqn) -> Work:
    """Count both triangles, which JAX computes as one product."""
    return _multiply_adds(eqn, _results(eqn) * _shape(eqn.invars[0])[-1])


@rule(cost_rules, "triangular_solve")
def _triangular_solve(eqn: JaxprEqn) -> Work:
    """Count n^2 for each right-hand side (GVL 3.1): each column, or each row."""
    _, side, _ = _matrices(eqn.invars[0])
    return Work(flops=_results(eqn) * side * (4 if _is_complex(eqn.outvars[0]) else 1))


@rule(cost_rules, "tridiagonal_solve")
def _tridiagonal_solve(eqn: JaxprEqn) -> Work:
    """Count 3 n for the elimination, and 5 n for each right-hand side (GVL 4.3)."""
    number, rows, columns = _matrices(eqn.invars[3])
    scale = 4 if _is_complex(eqn.outvars[0]) else 1
    return Work(flops=scale * number * rows * (3 + 5 * columns))


@rule(cost_rules, "fft")
def _fft(eqn: JaxprEqn) -> Work | None:
    """Count 5 n log2(n) operations for n complex elements, and half of that for real ones."""
    lengths = tuple(eqn.params["fft_lengths"])
    if not all(map(is_concrete_size, lengths)):
        return None
    rank, shape = len(lengths), _shape(eqn.invars[0])
    number = count(shape[: len(shape) - rank]) * count(lengths)
    halves = sum(map(binary_logarithm, lengths))
    both = _is_complex(eqn.invars[0]) and _is_complex(eqn.outvars[0])
    return Work(flops=number * halves * 5 // (1 if both else 2))


# --- random numbers -------------------------------------------------------------------------------


@rule(cost_rules, "random_bits", "rng_uniform")
def _random_bits(eqn: JaxprEqn) -> Work:
    return Work(random_numbers=_results(eqn))


@rule(cost_rules, "rng_bit_generator")
def _rng_bit_generator(eqn: JaxprEqn) -> Work:
    return Work(random_numbers=count(_shape(eqn.outvars[1])))


@rule(cost_rules, "threefry2x32")
def _threefry2x32(eqn: JaxprEqn) -> Work:
    return Work(random_numbers=sum(count(_shape(v)) for v in eqn.outvars))


@rule(cost_rules, "random_split", "random_fold_in")
def _new_keys(eqn: JaxprEqn) -> Work:
    return Work(random_numbers=2 * _results(eqn))


# --- collectives ----------------------------------------------------------------------------------


def collective(eqn: JaxprEqn) -> Work:
    """Return the cost of a collective: the bytes that each device sends."""
    return Work(bytes_communicated=sum(size_in_bytes(v.aval) for v in eqn.invars))


# --- trip counts ----------------------------------------------------------------------------------
# Find the trip count of a loop.


def trip_count(control: Regions) -> Any:
    """Return the number of times that the bodies of an equation run, or None if unknown.

    The trip count of a `while` is known if it counts up by 1 to a constant, as `fori_loop` does.
    """
    trips = control.view.trips
    return _counted(control.view) if trips is None and isinstance(control.view, While) else trips


def runs_of(control: Regions | None) -> Any:
    """Return the number of times that bodies run, which is 1 if it is unknown."""
    count = None if control is None else trip_count(control)
    return 1 if count is None else count


def _counted(loop: While) -> int | None:
    cond, body = jaxcompat.open_jaxpr(loop.cond), jaxcompat.open_jaxpr(loop.body)
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    counter, end = cond.eqns[0].invars
    position = _position(counter, cond.invars[len(loop.cond_consts) :])
    limit = _literal(end)
    if limit is None:
        place = _position(end, cond.invars)
        outside = (*loop.cond_consts, *loop.carry)
        # A limit that is carried is constant if the body passes it on.
        if place is None or not _stays(loop, place - len(loop.cond_consts)):
            return None
        limit = _literal(outside[place])
    start = None if position is None else _literal(loop.carry[position])
    if position is None or start is None or limit is None:
        return None
    inside = body.invars[len(loop.body_consts) + position]
    step = next((e for e in body.eqns if body.outvars[position] in e.outvars), None)
    return max(limit - start, 0) if step is not None and _adds_one(step, inside) else None


def _position(atom: Atom, among: Any) -> int | None:
    return next((i for i, other in enumerate(among) if other is atom), None)


def _literal(atom: Atom) -> int | None:
    whole = type(atom) is Literal and getattr(atom.aval, "dtype", None) is not None
    return (
        int(atom.val) if whole and atom.aval.shape == () and atom.aval.dtype.kind in "iu" else None
    )


def _stays(loop: While, position: int) -> bool:
    """Return True if a carried value never changes. Constants have a negative position."""
    body = jaxcompat.open_jaxpr(loop.body)
    return position < 0 or body.outvars[position] is body.invars[len(loop.body_consts) + position]


def _adds_one(eqn: JaxprEqn, counter: Atom) -> bool:
    values = [_literal(v) for v in eqn.invars]
    return eqn.primitive.name == "add" and counter in eqn.invars and 1 in values
