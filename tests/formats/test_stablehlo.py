"""StableHLO modules as programs: what JAX lowers is read, and computes the same bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.errors import ArgumentsError, ProgramFileError, UnsupportedError
from jaxprtool.extend import rule
from jaxprtool.formats import lowering
from jaxprtool.formats.lowering import exported, read_exported
from jaxprtool.formats.stablehlo import is_stablehlo, read_module_program, stablehlo_rules
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import top_jaxpr, type_check
from jaxprtool.ir.regions import view
from jaxprtool.jaxcompat import name_stack, user_frame
from tests.share import first_and_proofs


def text_of(fun, *args, locations=False):
    module = jax.jit(fun).lower(*args).compiler_ir("stablehlo")
    return module.operation.get_asm(enable_debug_info=locations)


def read(fun, *args, locations=False):
    return read_module_program(text_of(fun, *args, locations=locations).encode(), "m.mlir")


def names(program):
    return [eqn.primitive.name for eqn in equations(top_jaxpr(program))]


def prove(fun, *args):
    """Read the lowering of a function, and compare the bits of its results."""
    program = read(fun, *args)
    type_check(program)
    wanted, results = jax.jit(fun)(*args), jax.jit(program.flat_function())(*jax.tree.leaves(args))
    for x, y in zip(jax.tree.leaves(wanted), results, strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return program


X = jnp.arange(12.0).reshape(3, 4) / 7


def module(body, arguments="%x: tensor<3xf32>", result="tensor<3xf32>"):
    return f"func.func @main({arguments}) -> {result} {{\n{body}\n}}".encode()


# --- programs -------------------------------------------------------------------------------------


def test_regions_that_lax_names_are_recovered():
    def fun(x):
        largest = lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")
        parts = x.at[jnp.array([0, 2])].add(1.0), jnp.sort(x, 0), lax.top_k(x, 2)
        return x.sum(), x.max(0), (x > 1).any(), jnp.argmax(x, 1), largest, parts

    program = prove(fun, X)
    wanted = "reduce_sum reduce_max reduce_or argmax reduce_window_max scatter-add sort top_k"
    assert {*wanted.split()} <= {*names(program)}


def test_loops_with_a_counter_are_scans_and_others_while_loops():
    def fun(x):
        def body(carry, row):
            return carry * row, carry + row

        scanned = lax.scan(body, x[0], x)
        return scanned, lax.while_loop(lambda y: y.sum() < 9, lambda y: y * 2 + 1, x[0])

    program = prove(fun, X)
    assert [name for name in names(program) if name in ("scan", "while")] == ["scan", "while"]
    total = jax.grad(lambda x: program(x)[0].sum())
    expected = jax.grad(lambda x: fun(x)[0][0].sum())
    np.testing.assert_allclose(total(X), expected(X), rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_a_loop_reads_and_writes_are_sliced_and_stacked(reverse):
    def fun(x):
        return lax.scan(lambda c, row: (c * row, c + row), x[0], x, reverse=reverse)

    (scan,) = [eqn for eqn in top_jaxpr(prove(fun, X)).eqns if eqn.primitive.name == "scan"]
    found = view(scan)
    lengths = [len(part) for part in (found.consts, found.carry, found.xs, found.ys)]
    assert lengths == [0, 1, 1, 1] and found.reverse == reverse


def test_rows_of_another_order_stay_indexed():
    def fun(x):
        def body(i, c):
            return c.at[i].set(c[2 - i] + i), x[i] * x[i - 1]

        return lax.fori_loop(0, 3, lambda i, c: body(i, c[0]), (x, x[0]))

    prove(fun, X)


def test_branches_clamp_their_index_once():
    def fun(i, x):
        return lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), lax.cond(i > 0, jnp.exp, jnp.log, x)

    program = prove(fun, jnp.int32(1), X)
    assert names(program).count("clamp") == 1 and names(program).count("cond") == 2


def test_an_index_without_a_branch_takes_the_last_one():
    text = b"""
    func.func @main(%i: tensor<i32>) -> tensor<f32> {
      %r = "stablehlo.case"(%i) ({
        %a = stablehlo.constant dense<1.0> : tensor<f32>
        stablehlo.return %a : tensor<f32>
      }, {
        %b = stablehlo.constant dense<2.0> : tensor<f32>
        stablehlo.return %b : tensor<f32>
      }) : (tensor<i32>) -> tensor<f32>
      return %r : tensor<f32>
    }"""
    program = read_module_program(text)
    assert [float(program(jnp.int32(i))) for i in (-1, 0, 1, 2)] == [2, 1, 2, 2]


def test_functions_are_named_calls_that_share_their_body():
    @jax.jit
    def layer(x):
        return jnp.tanh(x) * 2

    program = prove(lambda x: layer(layer(x)), X)
    calls = [eqn for eqn in top_jaxpr(program).eqns if eqn.primitive.name == "jit"]
    assert [call.params["name"] for call in calls] == ["layer", "layer"]
    assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]


def test_random_numbers_need_no_64_bit_types():
    program = read(lambda key: jax.random.normal(key, (3, 2)), jax.random.key(0))
    assert not jaxprtool.ir.equations.has_64_bit_types(program.jaxpr)
    (data,) = (program(jax.random.key_data(jax.random.key(0))),)
    expected = jax.jit(lambda: jax.random.normal(jax.random.key(0), (3, 2)))()
    assert np.asarray(data).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("name", first_and_proofs(["cholesky", "inv", "eigvalsh"]))
def test_calls_of_lapack_have_derivatives(name):
    x = jnp.eye(3) * 3 + 0.5
    fun = getattr(jnp.linalg, name)
    program = prove(fun, x)
    assert "ffi_call" not in names(program)
    gradients = (jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(x) for f in (fun, program))
    np.testing.assert_allclose(*gradients, atol=1e-6)


def test_calls_of_lapack_for_empty_arrays_have_derivatives():
    x = jnp.zeros((2, 0, 0))
    program = read(jnp.linalg.cholesky, x)
    assert "ffi_call" not in names(program)
    assert program(x).shape == jax.grad(lambda x: program(x).sum())(x).shape == x.shape


def tridiagonal(x):
    return lax.linalg.tridiagonal_solve(x[0], x[1] + 4, x[2], x[:3, :1])


@pytest.mark.parametrize(
    "fun",
    first_and_proofs(
        [
            lambda x: jnp.linalg.qr(x)[0] + jnp.linalg.qr(x)[1].sum(),
            lambda x: jnp.linalg.qr(x, mode="r"),
            tridiagonal,
            lambda x: lax.cumlogsumexp(x, 0, reverse=True),
        ]
    ),
)
def test_calls_of_lapack_and_windows_that_jax_differentiates_have_its_derivatives(fun):
    x = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
    program = prove(fun, x)
    gradients = (jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(x) for f in (fun, program))
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_a_decomposition_of_which_more_than_r_is_read_has_no_derivative():
    text = text_of(lambda x: jnp.linalg.qr(x, mode="raw"), X)
    raw = read_module_program(text.encode(), "m.mlir")
    assert "ffi_call" in names(raw) and "qr" not in names(raw)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda x: raw(x)[0].sum())(X)


def test_constants_of_all_types():
    def fun(x):
        values = jnp.array([1.5, -2, 0.1]), jnp.array([1, 2, 3], "bfloat16"), jnp.array([1j, 2, 3])
        large = jnp.linspace(0, 1, 200), jnp.linspace(0, 1, 200).astype("bfloat16")
        small = jnp.array([1, -2, 3], "int4"), jnp.array([True, False]), jnp.zeros((0, 3))
        return x, values, large, small, jnp.full((2, 2), 1 + 2j), jnp.inf, jnp.array([jnp.nan])

    prove(fun, X)


def test_constants_at_the_end_of_a_module():
    text = module(
        "%c = stablehlo.constant dense_resource<blob> : tensor<3xf32>\n"
        "%y = stablehlo.add %x, %c : tensor<3xf32>\nreturn %y : tensor<3xf32>"
    )
    blob = "0x04000000" + np.arange(3, dtype=np.float32).tobytes().hex()
    end = f'{{-# dialect_resources: {{ builtin: {{ blob: "{blob}" }} }} #-}}'
    assert read_module_program(text + end.encode())(jnp.ones(3)).tolist() == [1, 2, 3]
    with pytest.raises(UnsupportedError, match="left out of the file"):
        read_module_program(text.replace(b"blob", b"__elided__"))


# --- names and lines ------------------------------------------------------------------------------


def test_names_donation_scopes_and_lines_survive():
    def step(params, x):
        with jax.named_scope("layer"):
            y = jnp.tanh(x @ params["w"])
        return {"loss": y.sum()}

    text = (
        jax.jit(step, donate_argnums=1)
        .lower({"w": X.T}, X)
        .compiler_ir("stablehlo")
        .operation.get_asm(enable_debug_info=True)
    )
    program = read_module_program(text.encode())
    assert (program.name, program.arg_names) == ("step", ("params['w']", "x"))
    assert program.out_names == ("result['loss']",)
    tanh = next(eqn for eqn in top_jaxpr(program).eqns if eqn.primitive.name == "tanh")
    assert name_stack(tanh) == "layer"
    assert user_frame(tanh).file == __file__ and user_frame(tanh).function.endswith("step")
    assert all(user_frame(eqn) for eqn in equations(top_jaxpr(program)))


def test_donated_arguments_are_donated():
    text = module("return %x : tensor<3xf32>", "%x: tensor<3xf32> {tf.aliasing_output = 0 : i32}")
    assert read_module_program(text).jit_keywords["donate_argnums"] == (0,)


def test_without_locations_lines_are_those_of_the_module():
    program = read_module_program(
        module("%y = stablehlo.sine %x : tensor<3xf32>\nreturn %y : tensor<3xf32>"), "a.mlir"
    )
    frame = user_frame(top_jaxpr(program).eqns[0])
    assert (frame.file, frame.line) == ("a.mlir", 2)


# --- other modules --------------------------------------------------------------------------------


def test_sorts_by_one_operand_in_any_direction():
    def sort(direction, kind, keys):
        return f"""
        %r:2 = "stablehlo.sort"(%x, %y) <{{dimension = 0 : i64, is_stable = true}}> ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
          %p = stablehlo.compare {direction}, {keys}, {kind} :
            (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }}) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
        return %r#0, %r#1 : tensor<4xf32>, tensor<4xf32>"""

    arguments = "%x: tensor<4xf32>, %y: tensor<4xf32>"
    result = "(tensor<4xf32>, tensor<4xf32>)"
    x, y = jnp.array([2.0, -0.0, 3.0, 0.0]), jnp.array([0.0, 1.0, 2.0, 3.0])
    for direction, kind, keys, order in (
        ("GT", "FLOAT", "%a, %b", [2, 0, 1, 3]),
        ("LT", "TOTALORDER", "%a, %b", [1, 3, 0, 2]),
        ("GT", "TOTALORDER", "%a, %b", [2, 0, 3, 1]),
        ("LT", "FLOAT", "%d, %c", [3, 2, 1, 0]),
    ):
        program = read_module_program(module(sort(direction, kind, keys), arguments, result))
        results = program(x, y)
        assert [*map(int, results[1])] == order
        assert np.asarray(results[0]).tobytes() == np.asarray(x)[np.array(order)].tobytes()


def test_sorts_by_a_key_that_the_comparison_computes():
    body = """
    %r:2 = "stablehlo.sort"(%x, %y) <{{dimension = 0 : i64, is_stable = true}}> ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
      %m = stablehlo.abs %a : tensor<f32>
      %n = stablehlo.{} %b : tensor<f32>
      %p = stablehlo.compare GT, %m, %n : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    }}) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    return %r#0, %r#1 : tensor<4xf32>, tensor<4xf32>"""
    signature = "%x: tensor<4xf32>, %y: tensor<4xf32>", "(tensor<4xf32>, tensor<4xf32>)"
    program = read_module_program(module(body.format("abs"), *signature))
    results = program(jnp.array([1.0, -3.0, 2.0, 3.0]), jnp.arange(4.0))
    assert [x.tolist() for x in results] == [[-3, 3, 2, 1], [1, 3, 2, 0]]
    with pytest.raises(UnsupportedError, match="or of one key of each element"):
        read_module_program(module(body.format("negate"), *signature))


# --- operations that `lax` lacks ------------------------------------------------------------------


def test_sums_and_products_of_booleans_are_or_and_and():
    body = """
    %s = stablehlo.add %x, %y : tensor<4xi1>
    %p = stablehlo.multiply %x, %y : tensor<4xi1>
    %i = stablehlo.constant dense<false> : tensor<i1>
    %r = stablehlo.reduce(%p init: %i) applies stablehlo.add across dimensions = [0]
      : (tensor<4xi1>, tensor<i1>) -> tensor<i1>
    return %s, %p, %r : tensor<4xi1>, tensor<4xi1>, tensor<i1>"""
    types = "(tensor<4xi1>, tensor<4xi1>, tensor<i1>)"
    program = read_module_program(module(body, "%x: tensor<4xi1>, %y: tensor<4xi1>", types))
    x, y = jnp.array([False, False, True, True]), jnp.array([False, True, False, True])
    assert [r.tolist() for r in program(x, y)] == [[False, *[True] * 3], [*[False] * 3, True], True]


def test_powers_of_integers():
    arguments = "%x: tensor<7xi32>, %y: tensor<7xi32>"
    body = "%z = stablehlo.power %x, %y : tensor<7xi32>\nreturn %z : tensor<7xi32>"
    x, y = jnp.array([-1, -1, -3, 1, -3, 0, -1]), jnp.array([1, 0, -3, -3, 3, 2, -3])
    program = read_module_program(module(body, arguments, "tensor<7xi32>"))
    assert jax.jit(program)(x, y).tolist() == [-1, 1, 0, 1, -27, 0, -1]
    cubes = module(
        "%c = stablehlo.constant dense<3> : tensor<7xi32>\n" + body.replace("%y", "%c"),
        *("%x: tensor<7xi32>", "tensor<7xi32>"),
    )
    program = read_module_program(cubes)
    assert names(program) == ["integer_pow"]
    assert program(x).tolist() == (x**3).tolist()


def test_comparisons_of_integers_without_a_sign():
    body = """
    %u = stablehlo.compare LT, %x, %y, UNSIGNED : (tensor<3xi32>, tensor<3xi32>) -> tensor<3xi1>
    %s = stablehlo.compare LT, %x, %y, SIGNED : (tensor<3xi32>, tensor<3xi32>) -> tensor<3xi1>
    return %u, %s : tensor<3xi1>, tensor<3xi1>"""
    arguments = "%x: tensor<3xi32>, %y: tensor<3xi32>"
    program = read_module_program(module(body, arguments, "(tensor<3xi1>, tensor<3xi1>)"))
    unsigned, signed = program(jnp.array([-1, 1, 2]), jnp.array([1, 2, -1]))
    assert (unsigned.tolist(), signed.tolist()) == ([False, True, True], [True, True, False])


def test_batch_normalization():
    kinds = "(tensor<4x3x2xf32>, tensor<3xf32>, tensor<3xf32>)"
    operand = "tensor<4x3x2xf32>"
    options = "<{epsilon = 0.01 : f32, feature_index = 1 : i64}>"
    body = f"""
    %t:3 = "stablehlo.batch_norm_training"(%x, %s, %o) {options} : {kinds} -> {kinds}
    %i = "stablehlo.batch_norm_inference"(%x, %s, %o, %t#1, %t#2) {options} :
      ({operand}, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) -> {operand}
    %g:3 = "stablehlo.batch_norm_grad"(%x, %s, %t#1, %t#2, %w) {options} :
      ({operand}, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, {operand}) -> {kinds}
    return %t#0, %i, %g#0, %g#1, %g#2 : {operand}, {operand}, {kinds[1:-1]}"""
    arguments = f"%x: {operand}, %s: tensor<3xf32>, %o: tensor<3xf32>, %w: {operand}"
    text = module(body, arguments, f"({operand}, {operand}, {kinds[1:-1]})")
    x, weights = jnp.sin(jnp.arange(48.0)).reshape(2, 4, 3, 2)
    scale, offset = jnp.arange(1.0, 7).reshape(2, 3)

    def normalized(x, scale, offset):
        scale, offset = scale[None, :, None], offset[None, :, None]
        mean, variance = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
        return scale * (x - mean) / jnp.sqrt(variance + 0.01) + offset

    def wanted(*args):
        y, slopes = jax.vjp(normalized, *args[:3])
        return y, y, *slopes(args[3])

    args = x, scale, offset, weights
    results = [jax.jit(fun)(*args) for fun in (read_module_program(text), wanted)]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [0, 1])
def test_selection_by_indices_as_torch_defines_it(batch):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    indices = jnp.array([[0, 2, 1, 1, 9], [2, 2, 0, 1, 0]])
    indices = indices if batch else indices[0]
    types = [f"tensor<{'x'.join(map(str, shape))}x" for shape in (x.shape, indices.shape)]
    types = f"{types[0]}f32>", f"{types[1]}i32>"
    body = f"""
    %y = "stablehlo.torch_index_select"(%x, %i) <{{dim = 1 : i64, batch_dims = {batch} : i64}}> :
      ({types[0]}, {types[1]}) -> tensor<2x5x4xf32>
    return %y : tensor<2x5x4xf32>"""
    arguments = f"%x: {types[0]}, %i: {types[1]}"
    program = read_module_program(module(body, arguments, "tensor<2x5x4xf32>"))
    rows = np.minimum(np.broadcast_to(indices, (2, 5)), 2)
    result = jax.jit(program)(x, indices)
    np.testing.assert_array_equal(result, np.asarray(x)[np.arange(2)[:, None], rows])


def test_tuples_and_tokens():
    text = b"""
    func.func @main(%t: tuple<tensor<3xf32>, tuple<tensor<2xi32>>>, %k: !stablehlo.token)
      -> (tuple<tensor<3xf32>, tensor<3xf32>>, !stablehlo.token, tensor<2xi32>) {
      %x = stablehlo.get_tuple_element %t[0]
        : (tuple<tensor<3xf32>, tuple<tensor<2xi32>>>) -> tensor<3xf32>
      %p = stablehlo.get_tuple_element %t[1]
        : (tuple<tensor<3xf32>, tuple<tensor<2xi32>>>) -> tuple<tensor<2xi32>>
      %i = stablehlo.get_tuple_element %p[0] : (tuple<tensor<2xi32>>) -> tensor<2xi32>
      %y, %l = call @f(%x, %k) : (tensor<3xf32>, !stablehlo.token)
        -> (tensor<3xf32>, !stablehlo.token)
      %b, %n = stablehlo.optimization_barrier %x, %l : tensor<3xf32>, !stablehlo.token
      %o = stablehlo.custom_call @mark(%x) : (tensor<3xf32>) -> !stablehlo.token
      %m = stablehlo.after_all %k, %n, %o : !stablehlo.token
      %r = stablehlo.tuple %y, %x : tuple<tensor<3xf32>, tensor<3xf32>>
      return %r, %m, %i : tuple<tensor<3xf32>, tensor<3xf32>>, !stablehlo.token, tensor<2xi32>
    }
    func.func private @f(%x: tensor<3xf32>, %k: !stablehlo.token)
      -> (tensor<3xf32>, !stablehlo.token) {
      %c = stablehlo.constant dense<5.0> : tensor<f32>
      %r:2 = stablehlo.while(%a = %x, %b = %k) : tensor<3xf32>, !stablehlo.token
      cond {
        %s = stablehlo.reduce(%a init: %c) applies stablehlo.add across dimensions = [0]
          : (tensor<3xf32>, tensor<f32>) -> tensor<f32>
        %p = stablehlo.compare LT, %s, %c : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %e = stablehlo.exponential %a : tensor<3xf32>
        stablehlo.return %e, %b : tensor<3xf32>, !stablehlo.token
      }
      return %r#0, %r#1 : tensor<3xf32>, !stablehlo.token
    }"""
    program = read_module_program(text)
    x, i = jnp.array([-1.0, -2.0, 0.5]), jnp.array([3, 4])
    y, same, integers = program(x, i)
    np.testing.assert_allclose(y, jnp.exp(x), rtol=1e-6)
    assert (same.tolist(), integers.tolist()) == (x.tolist(), i.tolist())


def test_operations_of_chlo_that_broadcast():
    body = """
    %z = chlo.broadcast_add %x, %y : (tensor<2x1xf32>, tensor<3xf32>) -> tensor<2x3xf32>
    %t = chlo.broadcast_compare %z, %y {comparison_direction = #chlo<comparison_direction GT>}
      : (tensor<2x3xf32>, tensor<3xf32>) -> tensor<2x3xi1>
    %h = "chlo.constant_like"(%z) <{value = 0.5 : f32}> : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %s = chlo.broadcast_select %t, %z, %h
      : (tensor<2x3xi1>, tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    return %s : tensor<2x3xf32>"""
    text = module(body, "%x: tensor<2x1xf32>, %y: tensor<3xf32>", "tensor<2x3xf32>")
    result = read_module_program(text)(jnp.array([[1.0], [-1.0]]), jnp.array([1.0, 2.0, 3.0]))
    assert result.tolist() == [[2, 3, 4], [0.5, 0.5, 0.5]]


QUANTIZED = "4x!quant.uniform<i8:f32, 0.5:3>"


def test_quantized_values_are_the_integers_that_store_them():
    weights = "4x2x!quant.uniform<i8:f32:1, {0.5,0.25}>"
    body = f"""
    %q = stablehlo.uniform_quantize %x : (tensor<4xf32>) -> tensor<{QUANTIZED}>
    %y = stablehlo.dot_general %q, %w, contracting_dims = [0] x [0] :
      (tensor<{QUANTIZED}>, tensor<{weights}>) -> tensor<2x!quant.uniform<i8:f32, 2.0>>
    %z = stablehlo.uniform_dequantize %y :
      (tensor<2x!quant.uniform<i8:f32, 2.0>>) -> tensor<2xf32>
    return %z, %q : tensor<2xf32>, tensor<{QUANTIZED}>"""
    arguments = f"%x: tensor<4xf32>, %w: tensor<{weights}>"
    text = module(body, arguments, f"(tensor<2xf32>, tensor<{QUANTIZED}>)")
    program = read_module_program(text)
    x = jnp.array([1.1, -2.0, 100.0, 0.25])
    w = jnp.array([[2, 4], [8, -4], [1, 0], [0, 127]], "int8")
    scaled, stored = jax.jit(program)(x, w)
    assert (stored.tolist(), stored.dtype) == ([5, -1, 127, 4], "int8")  # 3.5 is even as 4
    rows = (stored.astype("float32") - 3) * 0.5
    wanted = 2 * np.round(rows @ (w * np.array([0.5, 0.25])) / 2)
    assert scaled.tolist() == wanted.tolist()


def test_an_operation_without_a_meaning_for_quantized_values_is_refused():
    scalar = QUANTIZED[2:]
    body = f"""
    %r = "stablehlo.sort"(%x) ({{
    ^bb0(%a: tensor<{scalar}>, %b: tensor<{scalar}>):
      %p = stablehlo.compare LT, %a, %b : (tensor<{scalar}>, tensor<{scalar}>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    }}) : (tensor<{QUANTIZED}>) -> tensor<{QUANTIZED}>
    return %r : tensor<{QUANTIZED}>"""
    text = module(body, f"%x: tensor<{QUANTIZED}>", f"tensor<{QUANTIZED}>")
    with pytest.raises(UnsupportedError, match=r"stablehlo\.sort at m\.mlir:3 .*quantized values"):
        read_module_program(text, "m.mlir")


# --- sizes ----------------------------------------------------------------------------------------


def test_dynamic_operations_of_known_sizes_are_static_ones():
    body = """
    %s = stablehlo.constant dense<[2, 3]> : tensor<2xi64>
    %p = stablehlo.constant dense<[0, 0]> : tensor<2xi64>
    %h = stablehlo.constant dense<[0, 1]> : tensor<2xi64>
    %y = stablehlo.dynamic_broadcast_in_dim %x, %s, dims = [1]
      : (tensor<3xf32>, tensor<2xi64>) -> tensor<2x3xf32>
    %i = stablehlo.dynamic_iota %s, dim = 0 : (tensor<2xi64>) -> tensor<2x3xf32>
    %z = stablehlo.add %y, %i : tensor<2x3xf32>
    %o = stablehlo.constant dense<7.0> : tensor<f32>
    %w = stablehlo.dynamic_pad %z, %o, %p, %h, %p
      : (tensor<2x3xf32>, tensor<f32>, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>)
      -> tensor<2x4xf32>
    %r = stablehlo.dynamic_reshape %w, %q : (tensor<2x4xf32>, tensor<1xi64>) -> tensor<8xf32>
    return %r : tensor<8xf32>"""
    arguments = "%x: tensor<3xf32>, %q: tensor<1xi64>"
    program = read_module_program(module(body, arguments, "tensor<8xf32>"))
    with jax.enable_x64(True):
        result = program(jnp.array([0, 1, 2], "float32"), jnp.array([8]))
    assert result.tolist() == [0, 1, 2, 7, 1, 2, 3, 7]


def test_sizes_by_the_value_of_an_argument_are_refused():
    body = """
    %s = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
    %i = stablehlo.dynamic_iota %s, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>
    %y = stablehlo.add %i, %x : tensor<?xf32>
    return %y : tensor<?xf32>"""
    text = module(body, "%n: tensor<i32>, %x: tensor<?xf32>", "tensor<?xf32>")
    with pytest.raises(ProgramFileError, match=r"shapes: 'stablehlo\.dynamic_iota' .* m\.mlir:4"):
        read_module_program(text, "m.mlir", [(), (5,)])


def test_sizes_follow_from_shapes():
    scope = jax.export.SymbolicScope()
    (n,) = jax.export.symbolic_shape("n", scope=scope)
    artifact = jax.export.export(jax.jit(lambda x: jnp.sin(x).sum() + x))(
        jax.ShapeDtypeStruct((n,), "float32")
    )
    data = artifact.mlir_module_serialized
    with pytest.raises(ProgramFileError, match="sizes that are not known"):
        read_module_program(data)
    with pytest.raises(ArgumentsError, match="argument 0 is"):
        read_module_program(data, shapes=[(3, 3)])
    x = jnp.arange(5.0)
    np.testing.assert_allclose(read_module_program(data, shapes=[(5,)])(x), artifact.call(x))


def test_a_plug_in_adds_a_rule():
    text = module(
        '%y = "mine.square"(%x) {n = 2 : i64} : (tensor<3xf32>) -> tensor<3xf32>\n'
        "return %y : tensor<3xf32>"
    )
    with pytest.raises(UnsupportedError, match=r"mine\.square at m\.mlir:2 .*no rule for it"):
        read_module_program(text, "m.mlir")
    try:

        @rule("stablehlo", "mine.square")
        def square(op, x):
            op.require(n=2)
            return lax.mul(x, x)

        assert read_module_program(text)(jnp.arange(3.0)).tolist() == [0, 1, 4]
        with pytest.raises(UnsupportedError, match="n = 3"):
            read_module_program(text.replace(b"n = 2", b"n = 3"))
    finally:
        del stablehlo_rules["mine.square"]


# --- errors ---------------------------------------------------------------------------------------


def test_an_attribute_that_no_rule_knows_is_refused_with_the_number_of_others():
    line = "%{} = stablehlo.sine %x {{lossy = true}} : tensor<3xf32>"
    text = module("\n".join([*map(line.format, "abc"), "return %a : tensor<3xf32>"]))
    with pytest.raises(UnsupportedError) as raised:
        read_module_program(text, "m.mlir")
    message = "m.mlir: stablehlo.sine at m.mlir:2 cannot be read: unknown attribute lossy = true"
    assert str(raised.value) == f"{message} (2 more of its kind)"


#: A type of StableHLO without a dtype.
SIX_BITS = "tensor<3xf6E2M3FN>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"func.func @main() {", "m.mlir:1:18: expected operation name"),
        (b"module {}", "no function 'main'"),
        (
            module(f"return %x : {SIX_BITS}", f"%x: {SIX_BITS}", SIX_BITS),
            "elements of f6E2M3FN",
        ),
    ],
)
def test_what_is_no_program_of_jax_is_named(text, message):
    with pytest.raises(ProgramFileError, match=re.escape(message)):
        read_module_program(text, "m.mlir")


def test_calls_of_python_are_refused():
    fun = lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3, 4), "float32"), x)  # noqa: E731
    with pytest.raises(UnsupportedError, match="calls a Python function of the process"):
        read(fun, X)


# --- targets --------------------------------------------------------------------------------------


def test_text_and_bytecode_are_read_by_name(tmp_path):
    program = jaxprtool.trace(lambda x: jnp.sin(x) * 2, X)
    for name, data in (
        ("a.mlir", lowering.stablehlo(program).encode()),
        ("a.mlirbc", lowering.stablehlo_bytecode(program)),
    ):
        assert is_stablehlo(data)
        path = tmp_path / name
        path.write_bytes(data)
        assert names(jaxprtool.read(path)) == ["sin", "mul"]
        assert names(jaxprtool.load(str(path))) == ["sin", "mul"]


def test_a_symbolic_module_takes_its_sizes_from_args(tmp_path):
    artifact = jax.export.export(jax.jit(jnp.sin))(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), "float32")
    )
    path = tmp_path / "s.mlir"
    path.write_bytes(artifact.mlir_module_serialized)
    assert jaxprtool.load(str(path), "f32[7]").in_avals[0].shape == (7,)


def test_artifacts_are_inlined_and_differentiated():
    program = jaxprtool.trace(lambda x, y: jnp.sin(x).sum(), X, 1.0)
    call = read_exported(exported(program))
    inlined = call.apply("inline_exported")
    assert names(call) == ["call_exported"] and names(inlined) == ["sin", "reduce_sum"]
    np.testing.assert_allclose(call.apply("inline_exported, grad")(X, 1.0), jnp.cos(X), rtol=1e-6)


def test_composites_are_the_primitives_of_their_names():
    def fun(x):
        return jax.scipy.special.erf(x), lax.top_k(x, 2), lax.asin(x / 2)

    program = read_exported(exported(jaxprtool.trace(fun, X))).apply("inline_exported")
    assert {"erf", "top_k"} <= {*names(program)}
    results, wanted = jax.tree.leaves(program(X)), jax.tree.leaves(fun(X))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), results, wanted)


def test_an_artifact_for_several_platforms_is_refused():
    program = jaxprtool.trace(jnp.sin, X)
    call = read_exported(exported(program, ("cpu", "cuda")))
    with pytest.raises(UnsupportedError, match="several platforms"):
        call.apply("inline_exported")


# --- operations without a rule --------------------------------------------------------------------

NORMAL = b"""
func.func @main(%low: tensor<f32>, %high: tensor<f32>, %shape: tensor<1xi32>) -> tensor<4xf32> {
  %0 = stablehlo.rng %low, %high, %shape, distribution = NORMAL
    : (tensor<f32>, tensor<f32>, tensor<1xi32>) -> tensor<4xf32>
  %1 = stablehlo.sine %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}"""


def test_operations_of_xla_without_a_rule_are_kept_as_calls_that_run():
    with pytest.raises(UnsupportedError, match=r"rng at m.mlir:3 cannot be read") as error:
        read_module_program(NORMAL, "m.mlir")
    assert error.value.hint == "--opaque keeps it as an equation that can be shown"
    program = read_module_program(NORMAL, "m.mlir", opaque=True)
    assert names(program) == ["call_exported", "sin"]
    shape = jnp.array([4], np.int32)
    values = [jax.jit(program)(low, 1.0, shape) for low in (np.float32(0), np.float32(50))]
    assert values[0].shape == (4,) and not np.array_equal(*values)
    text = lowering.stablehlo(program)
    assert "distribution =  NORMAL" in text.replace("= NORMAL", "=  NORMAL")
    again = read_module_program(text.encode(), "m.mlir", opaque=True)
    assert "call_exported" in names(again)
    with pytest.raises(NotImplementedError, match="Differentiation rule for 'call_exported'"):
        jax.grad(lambda low: program(low, 1.0, shape).sum())(0.0)


def test_a_kept_operation_has_its_regions_and_functions():
    text = b"""
    func.func @main(%x: tensor<3xf32>, %y: tensor<3xf32>) -> tensor<3xf32> {
      %0 = stablehlo.composite "my.scaled" %x {decomposition = @scaled}
        : (tensor<3xf32>) -> tensor<3xf32>
      %1:2 = "stablehlo.sort"(%0, %y) ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
        %left = stablehlo.add %a, %c : tensor<f32>
        %right = stablehlo.add %d, %b : tensor<f32>
        %less = stablehlo.compare LT, %left, %right : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %less : tensor<i1>
      }) : (tensor<3xf32>, tensor<3xf32>) -> (tensor<3xf32>, tensor<3xf32>)
      return %1#0 : tensor<3xf32>
    }
    func.func private @scaled(%x: tensor<3xf32>) -> tensor<3xf32> {
      %0 = stablehlo.add %x, %x : tensor<3xf32>
      return %0 : tensor<3xf32>
    }"""
    program = read_module_program(text, "m.mlir", opaque=True)
    assert names(program) == ["jit", "call_exported", "add"]
    x, y = np.array([3, 1, 2], np.float32), np.array([-9, 0, 0], np.float32)
    np.testing.assert_array_equal(jax.jit(program)(x, y), [6.0, 2.0, 4.0])


def test_constants_without_their_elements_can_only_be_looked_at():
    text = module(
        "%w = stablehlo.constant dense_resource<__elided__> : tensor<3x3xf32>\n"
        "%y = stablehlo.dot %x, %w : (tensor<3xf32>, tensor<3x3xf32>) -> tensor<3xf32>\n"
        "return %y : tensor<3xf32>"
    )
    with pytest.raises(UnsupportedError, match=r"constant at m\.mlir:2 .* left out of the file"):
        read_module_program(text, "m.mlir")
    program = read_module_program(text, "m.mlir", opaque=True)
    assert names(program) == ["stablehlo.constant", "dot_general"]
    assert jaxprtool.cost(program).total.work.flops == 18


def test_operations_of_other_dialects_can_only_be_looked_at(tmp_path):
    text = module(
        '  %0 = "my.op"(%x) {scale = 3.0 : f32} : (tensor<3xf32>) -> tensor<3xf32>\n'
        "  return %0 : tensor<3xf32>"
    )
    program = read_module_program(text, "m.mlir", opaque=True)
    assert "my.op[scale=3.000000e+00 : f32]" in str(program.jaxpr)
    with pytest.raises(UnsupportedError, match=r"my.op at m.mlir:2 is opaque .* be compiled"):
        jax.jit(program)(jnp.ones(3))
    jaxprtool.write(program, tmp_path / "m.jaxpr")
    assert names(jaxprtool.read(tmp_path / "m.jaxpr")) == ["my.op"]


def test_what_has_effects_is_refused_by_name():
    text = module(
        "  %t = stablehlo.create_token : !stablehlo.token\n"
        '  %0:2 = "stablehlo.infeed"(%t) {infeed_config = "", layout = [[0]]}'
        " : (!stablehlo.token) -> (tensor<3xf32>, !stablehlo.token)\n"
        "  return %0#0 : tensor<3xf32>"
    )
    for opaque, why in ((False, "it exchanges data"), (True, "it has effects")):
        with pytest.raises(UnsupportedError, match=f"infeed at m.mlir:3 cannot be read: {why}"):
            read_module_program(text, "m.mlir", opaque=opaque)
    program = read_module_program(
        module("  %t = stablehlo.create_token : !stablehlo.token\n  return %x : tensor<3xf32>")
    )
    assert names(program) == []


# --- modules of other front ends ------------------------------------------------------------------


def test_constants_may_stand_before_the_region_that_reads_them():
    def fun(x):
        return jnp.sort(x, 0), jnp.argsort(x, 1), jnp.argmax(x, 0), lax.fori_loop(0, 3, power, x)

    def power(i, x):
        return x * x

    artifact = jax.export.export(jax.jit(fun))(X)
    assert "@argsort" in artifact.mlir_module()
    program = read_module_program(artifact.mlir_module_serialized)
    assert names(program).count("sort") == 2 and {"argmax", "scan"} <= {*names(program)}
    wanted, results = fun(X), program(X)
    for a, b in zip(wanted, results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_operations_as_tensorflow_writes_them():
    program = read_module_program(
        module(
            """
            %0 = stablehlo.dot %x, %w, precision = [DEFAULT, DEFAULT]
              : (tensor<2x3xf32>, tensor<3x2xf32>) -> tensor<2x2xf32>
            %1 = stablehlo.transpose %0, dims = [1, 0] {xla_shape = "f32[2,2]{0,1}",
              result_layout = dense<[0, 1]> : tensor<2xindex>}
              : (tensor<2x2xf32>) -> tensor<2x2xf32>
            %two = stablehlo.constant dense<2> : tensor<i32>
            %2 = stablehlo.set_dimension_size %1, %two, dim = 1
              : (tensor<2x2xf32>, tensor<i32>) -> tensor<2x2xf32>
            %3 = "mhlo.copy"(%2) : (tensor<2x2xf32>) -> tensor<2x2xf32>
            %4 = "mhlo.erf"(%3) : (tensor<2x2xf32>) -> tensor<2x2xf32>
            return %4 : tensor<2x2xf32>
            """,
            "%x: tensor<2x3xf32>, %w: tensor<3x2xf32>",
            "tensor<2x2xf32>",
        )
    )
    assert names(program) == ["dot_general", "transpose", "erf"]
    x, w = X[:2, :3], X.reshape(4, 3).T[:, :2]
    np.testing.assert_array_equal(program(x, w), lax.erf((x @ w).T))


@pytest.mark.parametrize(("state", "dtype"), [("3xui64", r"uint64\[3\]"), ("2xi64", r"int64\[2\]")])
def test_random_bits_of_another_state_than_jaxs_are_refused(state, dtype):
    text = module(
        f"%0:2 = stablehlo.rng_bit_generator %x, algorithm = PHILOX"
        f" : (tensor<{state}>) -> (tensor<{state}>, tensor<4xui32>)\nreturn %0#1 : tensor<4xui32>",
        f"%x: tensor<{state}>",
        "tensor<4xui32>",
    )
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match=f"its state is {dtype}"):
        read_module_program(text)
