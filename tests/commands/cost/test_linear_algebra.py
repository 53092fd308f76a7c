"""The cost of each algorithm of linear algebra is the textbook's, for what the program reads.

GVL is Golub and Van Loan, "Matrix Computations", 4th edition; LAWN 41 is LAPACK Working Note 41.
"""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax

from jaxprtool import cost, trace
from jaxprtool.commands.cost.rules import cost_rules

LINALG = lax.linalg
SHAPES = [(12, 5), (5, 12), (7, 7)]


def product_of_reflectors(m, n, k):
    """LAWN 41, xORGQR: the first n columns of k reflectors of m elements; also xGEQRF."""
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 / 3 * k**3


def singular_values(m, n):
    """GVL 8.6, by Golub and Reinsch."""
    return 4 * max(m, n) * min(m, n) ** 2 - 4 / 3 * min(m, n) ** 3


def some_singular_vectors(m, n, number, sides):
    """LAWN 41, xORMBR: from the bidiagonal form."""
    return singular_values(m, n) + 2 * m * n * number * sides


def r_svd(m, n, squares, cubes):
    """GVL 8.6, by the R-SVD: as a polynomial in the longer and the shorter side."""
    long, short = max(m, n), min(m, n)
    return squares(long, short) + cubes * short**3


def thin(m, n):
    return r_svd(m, n, lambda a, b: 6 * a * b**2, 20)


def full(m, n):
    return r_svd(m, n, lambda a, b: 4 * a**2 * b, 22)


RECTANGULAR = {
    "svd": (jnp.linalg.svd, full),
    "svd, thin": (lambda x: jnp.linalg.svd(x, full_matrices=False), thin),
    "svd, values": (lambda x: jnp.linalg.svd(x, compute_uv=False), singular_values),
    "svd, values read": (lambda x: jnp.linalg.svd(x, full_matrices=False)[1], singular_values),
    "svd, QR": (lambda x: LINALG.svd(x, algorithm=LINALG.SvdAlgorithm.QR), full),
    "svd, some": (
        lambda x: LINALG.svd(x, full_matrices=False, subset_by_index=(0, 2)),
        lambda m, n: some_singular_vectors(m, n, 2, 2),
    ),
    "svd, some values": (
        lambda x: LINALG.svd(x, compute_uv=False, full_matrices=False, subset_by_index=(0, 2)),
        singular_values,
    ),
    "rank": (jnp.linalg.matrix_rank, singular_values),
    "qr": (
        jnp.linalg.qr,
        lambda m, n: sum(product_of_reflectors(m, k, min(m, n)) for k in (n, min(m, n))),
    ),
    "qr, complete": (
        lambda x: jnp.linalg.qr(x, mode="complete"),
        lambda m, n: sum(product_of_reflectors(m, k, min(m, n)) for k in (n, m)),
    ),
    "qr, r": (
        lambda x: jnp.linalg.qr(x, mode="r"),
        lambda m, n: product_of_reflectors(m, n, min(m, n)),
    ),
    "qr, r of a call": (
        lambda x: jax.jit(jnp.linalg.qr)(x)[1],
        lambda m, n: product_of_reflectors(m, n, min(m, n)),
    ),
    "qr, raw": (
        lambda x: jnp.linalg.qr(x, mode="raw"),
        lambda m, n: product_of_reflectors(m, n, min(m, n)),
    ),
    "qr, pivoted r": (
        lambda x: jsl.qr(x, mode="r", pivoting=True),
        lambda m, n: product_of_reflectors(m, n, min(m, n)),
    ),
    "lu": (LINALG.lu, lambda m, n: product_of_reflectors(m, n, min(m, n)) / 2),
}

SQUARE = {
    "cholesky": (LINALG.cholesky, lambda n: n**3 / 3),
    "cholesky_update": (
        lambda a: LINALG.cholesky_update(a, jnp.ones(len(a), a.dtype)),
        lambda n: 6 * n * n / 2,
    ),
    "eigh": (LINALG.eigh, lambda n: 9 * n**3),
    "eigh, values": (jnp.linalg.eigvalsh, lambda n: 4 / 3 * n**3),
    "eigh, values only": (lambda a: jsl.eigh(a, eigvals_only=True), lambda n: 4 / 3 * n**3),
    "eigh, some": (
        lambda a: LINALG.eigh(a, subset_by_index=(1, 4)),
        lambda n: 4 / 3 * n**3 + 2 * n**2 * 3,
    ),
    "eig": (LINALG.eig, lambda n: (25 + 8 / 3) * n**3),
    "eig, right": (jnp.linalg.eig, lambda n: (25 + 4 / 3) * n**3),
    "eig, values": (jnp.linalg.eigvals, lambda n: 10 * n**3),
    "eig, values read": (lambda a: LINALG.eig(a)[0], lambda n: 10 * n**3),
    "schur": (LINALG.schur, lambda n: 25 * n**3),
    "schur, no vectors": (
        lambda a: LINALG.schur(a, compute_schur_vectors=False)[0],
        lambda n: 10 * n**3,
    ),
    "hessenberg": (LINALG.hessenberg, lambda n: 10 / 3 * n**3),
    "hessenberg, q": (
        lambda a: jsl.hessenberg(a, calc_q=True)[1],
        lambda n: 10 / 3 * n**3 + 4 / 3 * (n - 1) ** 3,
    ),
    "tridiagonal": (LINALG.tridiagonal, lambda n: 4 / 3 * n**3),
    "solve": (lambda a: jnp.linalg.solve(a, a), lambda n: 2 / 3 * n**3 + 2 * n**3),
    "inv": (jnp.linalg.inv, lambda n: 2 / 3 * n**3 + 2 * n**3),
    "cho_solve": (lambda a: jsl.cho_solve((a, True), a[:, :2]), lambda n: 2 * 2 * n**2),
    "triangular, right": (lambda a: LINALG.triangular_solve(a, a[:3]), lambda n: 3 * n**2),
    "triangular, left": (
        lambda a: LINALG.triangular_solve(a, a[:, :3], left_side=True),
        lambda n: 3 * n**2,
    ),
    "tridiagonal_solve": (
        lambda a: LINALG.tridiagonal_solve(a[0], a[0], a[0], a[:, :3]),
        lambda n: 3 * n + 5 * n * 3,
    ),
    "householder_product": (
        lambda a: LINALG.householder_product(a[:, :4], a[0, :3]),
        lambda n: product_of_reflectors(n, 4, 3),
    ),
    "ormqr": (
        lambda a: LINALG.ormqr(a[:, :3], a[0, :3], a[:, :5]),
        lambda n: 4 * n * 5 * 3 - 2 * 5 * 9,
    ),
    "ormqr, right": (
        lambda a: LINALG.ormqr(a[:, :3], a[0, :3], a[:5], left=False),
        lambda n: 4 * n * 5 * 3 - 2 * 5 * 9,
    ),
    "polar by svd": (
        lambda a: jsl.polar(a, method="svd"),
        lambda n: thin(n, n) + 2 * 2 * n**3,
    ),
}
#: The primitives of the algorithms above.
ALGORITHMS = {
    *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "lu", "ormqr"),
    *("householder_product", "qr", "schur", "svd", "triangular_solve", "tridiagonal"),
    *("tridiagonal_solve", "dot_general"),
}


#: Ways to apply an algorithm: the leading axes, the dtype, and the FLOPs by those of one matrix.
WAYS = [((), "float32", 1), ((), "complex64", 4), ((3,), "float32", 3)]


def check(function, shape, expected, ways=WAYS):
    """Check the FLOPs of a function on real and complex matrices, and on a batch of them."""
    for batch, dtype, scale in ways:
        mapped = jax.vmap(function) if batch else function
        found = cost(trace(mapped, jax.ShapeDtypeStruct((*batch, *shape), dtype)), "primitive")
        assert not found.unknown
        flops = sum(group.work.flops for group in found.groups if group.name in ALGORITHMS)
        assert flops == pytest.approx(scale * expected, abs=2), (batch, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECTANGULAR)
def test_rectangular_matrices_cost_what_the_textbook_says(name, shape):
    function, expected = RECTANGULAR[name]
    check(function, shape, expected(*shape), WAYS if shape == SHAPES[0] else WAYS[:1])


@pytest.mark.parametrize("name", SQUARE)
def test_square_matrices_cost_what_the_textbook_says(name):
    function, expected = SQUARE[name]
    # JAX updates real matrices only, one at a time.
    check(function, (7, 7), expected(7), WAYS[:1] if name == "cholesky_update" else WAYS)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=str)
def test_singular_vectors_of_one_side_cost_less(shape):
    long_side = 0 if shape[0] > shape[1] else 2
    m, n = max(shape), min(shape)
    for full, side, expected in [
        (False, long_side, 6 * m * n**2 + 11 * n**3),
        (True, long_side, 4 * m**2 * n + 13 * n**3),
        (True, 2 - long_side, 2 * m * n**2 + 11 * n**3),
    ]:
        program = trace(lambda x: jnp.linalg.svd(x, full)[side], np.ones(shape))  # noqa: B023
        assert cost(program).total.work.flops == expected


def test_iterative_algorithms_are_named_as_unknown():
    algorithm, x = LINALG.SvdAlgorithm.JACOBI, np.ones((4, 4))
    assert cost(trace(lambda x: LINALG.svd(x, algorithm=algorithm), x)).unknown == {"svd": 1}
    implementation = LINALG.EighImplementation.QDWH
    program = trace(lambda x: LINALG.eigh(x, implementation=implementation), x)
    assert cost(program).unknown == {"eigh": 1}


def test_symbolic_sizes_have_polynomials():
    square = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, n"), "float32")
    vectors, values, triangle = (
        cost(trace(function, square)).total.work.flops
        for function in (
            lambda x: LINALG.eigh(x, symmetrize_input=False),
            lambda x: LINALG.eigh(x, symmetrize_input=False)[1],
            lambda x: LINALG.qr(x)[1],
        )
    )
    assert str(vectors) == "9*n^3"
    assert [each._evaluate({"n": 6}) for each in (values, triangle)] == [4 * 6**3 // 3] * 2


def test_every_primitive_of_linear_algebra_has_a_rule():
    primitives = (value for name, value in vars(LINALG).items() if name.endswith("_p"))
    assert [p.name for p in primitives if cost_rules.get(p.name) is None] == []
