"""Sparse matrices of JAX in files and as Python: their primitives and records are public."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

import jaxprtool
from jaxprtool.formats.jaxpr.read import parse
from jaxprtool.formats.jaxpr.write import text

x = jnp.arange(6.0).reshape(3, 2)


def products(x):
    dense = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    matrix = sparse.BCOO.fromdense(dense, nse=3)
    rows = sparse.BCSR.from_bcoo(matrix)
    triples = sparse.COO.fromdense(dense, nse=3)
    return matrix @ x, matrix.T @ x, (matrix @ matrix).todense(), rows @ x, triples @ x


def test_sparse_products_are_read_from_files():
    program = jaxprtool.trace(products, x)
    again = parse(text(program), "products")
    assert jaxprtool.equivalent(again, program)
    for got, wanted in zip(again(x), products(x), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_file_imports_what_its_primitives_need(tmp_path):
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
