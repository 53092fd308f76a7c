"""JAX's sparse matrices in files and as Python: their primitives and records are public."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jaxprtool
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text

x = jnp.arange(6.0).reshape(3, 2)


def products(x):
    dense = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    matrix = sparse.BCOO.fromdense(dense, nse=3)
    rows = sparse.BCSR.from_bcoo(matrix)
    triples = sparse.COO.fromdense(dense, nse=3)
    return matrix @ x, matrix.T @ x, (matrix @ matrix).todense(), rows @ x, triples @ x


@pytest.mark.usefixtures("processes")
def test_sparse_products_are_read_from_files():
    program = jaxprtool.trace(products, x)
    again = parse_program(program_file_text(program), "products")
    assert jaxprtool.equivalent(again, program)
    for got, wanted in zip(again(x), products(x), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.usefixtures("processes")
def test_a_file_imports_the_modules_of_its_primitives(tmp_path):
    jaxprtool.write(jaxprtool.trace(products, x), tmp_path / "products.jaxpr")
    read = "jaxprtool.read(sys.argv[1]).jaxpr.eqns"
    code = f"import jaxprtool, sys; print(*(eqn.primitive for eqn in {read}))"
    command = [sys.executable, "-c", code, str(tmp_path / "products.jaxpr")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bcoo_dot_general" in done.stdout.split()


def test_sparse_products_as_python_trace_to_the_same_program():
    program = jaxprtool.trace(products, x)
    module = {}
    exec(jaxprtool.to_python(program), module)
    assert jaxprtool.equivalent(jaxprtool.trace(module["products"], x), program)


@pytest.mark.parametrize("kind", [sparse.BCSR, sparse.CSR, sparse.CSC, sparse.COO, sparse.BCOO])
def test_sparse_matrices_are_arguments_and_results(kind):
    def function(matrix, x):
        doubled = jax.tree.map(lambda leaf: leaf * 2 if leaf.dtype == x.dtype else leaf, matrix)
        return doubled, matrix @ x, matrix.todense()

    dense = np.array([[2, 0, 0], [0, 0, 3], [1, 0, 0]], np.float32)
    given = jax.jit(partial(kind.fromdense, nse=3))(dense), x
    program = jaxprtool.trace(function, *given)
    again = parse_program(program_file_text(program), "matrices")
    module = {}
    exec(jaxprtool.to_python(program), module)
    assert jaxprtool.equivalent(again, program)
    assert jaxprtool.equivalent(jaxprtool.trace(module["function"], *given), program)
    result, expected = jax.jit(again)(*given), jax.jit(function)(*given)
    assert isinstance(result[0], kind)
    for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
