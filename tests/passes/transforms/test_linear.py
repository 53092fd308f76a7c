"""vjp, linearize and linear_transpose: two halves, their residuals and names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxprtool import trace
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import type_check
from jaxprtool.passes.transforms.linear import LinearTranspose, Vjp

PARAMS = {"w": jnp.full((3, 4), 0.1), "b": jnp.ones(4)}
X = jnp.ones((2, 3))


def model(params, x):
    return jnp.exp(x @ params["w"] + params["b"])


def residuals_of(parts):
    return list(parts["forward"](PARAMS, X)[1])


def line_of(text):
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_the_halves_together_equal_jaxs_vjp():
    parts = trace(model, PARAMS, X).apply("vjp")
    assert list(parts) == ["forward", "backward"]
    result, residuals = parts["forward"](PARAMS, X)
    cotangents = jnp.arange(8.0).reshape(2, 4)
    expected, pull = jax.vjp(model, PARAMS, X)
    assert jnp.array_equal(result, expected)
    gradients = jax.tree.leaves(parts["backward"](residuals, cotangents))
    for ours, theirs in zip(gradients, jax.tree.leaves(pull(cotangents)), strict=True):
        assert jnp.array_equal(ours, theirs)


def test_the_halves_together_equal_jaxs_linearize():
    parts = trace(model, PARAMS, X).apply("linearize")
    result, residuals = parts["forward"](PARAMS, X)
    expected, push = jax.linearize(model, PARAMS, X)
    assert jnp.array_equal(result, expected)
    assert jnp.array_equal(parts["backward"](residuals, (PARAMS, X)), push(PARAMS, X))


@pytest.mark.parametrize("name", ["vjp", "linearize"])
def test_residuals_are_named_by_source_line_or_argument(name):
    parts = trace(model, PARAMS, X).apply(name)
    names = residuals_of(parts)
    line = line_of('return jnp.exp(x @ params["w"]')
    assert f"test_linear.py:{line} exp" in names
    assert {"x", "params['w']"} <= set(names)
    assert "params['b']" not in names  # backward does not read it
    assert parts["backward"].arg_names[: len(names)] == tuple(f"residuals[{n!r}]" for n in names)


def test_backward_names_its_arguments_and_results():
    parts = trace(model, PARAMS, X).apply("vjp")
    assert parts["backward"].arg_names[-1] == "cotangents"
    assert parts["backward"].out_names == ("result[0]['b']", "result[0]['w']", "result[1]")
    assert (parts["forward"].name, parts["backward"].name) == ("model_forward", "model_backward")
    parts = trace(model, PARAMS, X).apply("linearize")
    assert parts["backward"].arg_names[-3:] == ("d_params['b']", "d_params['w']", "d_x")


def test_equal_names_are_numbered_and_checkpoint_names_are_kept():
    def fun(x):
        first = checkpoint_name(jnp.sin(x) * 2.0, "first")
        return jnp.sin(jnp.sin(first)) * first

    names = trace(fun, 1.0).apply("vjp")["forward"].out_names
    line = line_of("return jnp.sin(jnp.sin(first)) * first")
    assert "result[1]['first']" in names
    assert {f"result[1]['test_linear.py:{line} cos{n}']" for n in ("", "_2")} <= set(names)


@pytest.mark.parametrize("name", ["vjp", "linearize"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_residual_saved_under_a_policy_keeps_its_checkpoint_name(name, wrap):
    def fun(x):
        first = checkpoint_name(jnp.sin(x) * 2.0, "first")
        return jnp.sin(checkpoint_name(jnp.exp(first) * x, "second")).sum()

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["first"],
        names_which_can_be_offloaded=["second"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    parts = trace(wrap(jax.checkpoint(fun, policy=policy)), jnp.ones(3)).apply(name)
    names = {f"result[1]['{residual}']" for residual in ("first", "second", "x")}
    assert set(parts["forward"].out_names) == {"result[0]", *names}


def test_a_residual_of_one_branch_keeps_its_checkpoint_name():
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("kept"))
    def branch(x):
        return jnp.sin(checkpoint_name(jnp.exp(x), "kept")) * x

    parts = trace(lambda p, x: jax.lax.cond(p, branch, jnp.negative, x), True, X).apply("vjp")
    assert "result[1]['kept']" in parts["forward"].out_names
    assert not any("broadcast" in name for name in parts["forward"].out_names)


def test_a_residual_that_a_policy_offloads_has_the_line_that_made_it():
    def fun(x, w):
        return jnp.sin(x @ w).sum()

    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    parts = trace(jax.checkpoint(fun, policy=policy), X, PARAMS["w"]).apply("vjp")
    line = line_of("return jnp.sin(x @ w).sum()")
    assert f"result[1]['test_linear.py:{line} dot_general']" in parts["forward"].out_names


def test_a_residual_inside_a_call_or_loop_has_the_line_in_it():
    def fun(x):
        def step(c, a):
            c = jnp.exp(c) * a
            return c, c

        return jax.jit(lambda x: jnp.sin(x))(jax.lax.scan(step, x[0], x)[1]).sum()

    names = trace(fun, jnp.ones(3)).apply("vjp")["forward"].out_names
    assert f"result[1]['test_linear.py:{line_of('c = jnp.exp(c) * a')} exp']" in names
    assert f"result[1]['test_linear.py:{line_of('return jax.jit(lambda x: jnp')} cos']" in names


def test_constants_are_constants_of_both_halves():
    table = jnp.arange(3.0)
    parts = trace(lambda x: jnp.sin(x * table).sum(), X[0]).apply("vjp")
    assert len(parts["forward"](X[0])[1]) == 1
    assert any(const is table for const in parts["backward"].jaxpr.consts)


@pytest.mark.parametrize("name", ["vjp", "linearize"])
def test_aux_is_the_last_result_and_needs_a_pair(name):
    parts = trace(lambda x: (jnp.sin(x), {"x": x}), 2.0).apply(f"{name}(has_aux=True)")
    result, residuals, aux = parts["forward"](2.0)
    assert result == jnp.sin(2.0) and aux == {"x": 2.0} and len(residuals) == 1
    with pytest.raises(ArgumentsError, match="must return a pair"):
        trace(jnp.sin, 2.0).apply(f"{name}(has_aux=True)")


def test_keyword_arguments_are_not_differentiated():
    program = trace(lambda x, *, scale: jnp.sin(x) * scale, 2.0, scale=3.0)
    parts = program.apply("vjp")
    _, residuals = parts["forward"](2.0, scale=3.0)
    assert "scale" in residuals
    assert parts["backward"](residuals, 1.0) == (jnp.cos(2.0) * 3.0,)


def test_a_pass_can_apply_to_one_half():
    parts = trace(model, PARAMS, X).apply("vjp, backward.dce")
    for part in parts.values():
        type_check(part)


def test_integer_arguments_have_float0_cotangents():
    parts = trace(lambda x, i: x * i, 2.0, 3).apply("vjp")
    assert [a.dtype for a in parts["backward"].out_avals] == [jnp.float32, jax.dtypes.float0]


def test_linear_transpose_equals_jaxs():
    def linear(x, y):
        return {"a": 3 * x + y.sum(), "b": x.T}

    args = jnp.ones((2, 3)), jnp.ones(4)
    program = trace(linear, *args).apply("linear_transpose")
    cotangents = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2))}
    direct = trace(lambda cotangents: jax.linear_transpose(linear, *args)(cotangents), cotangents)
    assert structural_difference(program, direct) is None
    assert program.arg_names == ("cotangents['a']", "cotangents['b']")


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: lambda *args: jax.jit(f)(*args)])
def test_linear_functions_of_integers_have_a_transpose(wrap):
    fun = wrap(lambda x, y: (2 * x - 3 * y, y.sum()))
    args = jnp.arange(3), jnp.arange(3)
    program = trace(fun, *args).apply("linear_transpose")
    cotangents = jnp.arange(3), jnp.int32(1)
    direct = trace(lambda *given: jax.linear_transpose(fun, *args)(given), *cotangents)
    assert structural_difference(program, direct.replace(in_tree=program.in_tree)) is None
    pulled = program(cotangents)
    assert [x.tolist() for x in pulled] == [[0, 2, 4], [1, -2, -5]]
    assert trace(lambda x, y: 2 * x - 3 * y, 1, 1).apply("linear_transpose")(5) == (10, -15)


MASK = np.array([False, False, True, False])
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.where(MASK, x, 0),
        lambda x: jnp.pad(x, 1),
        lambda x: jax.jit(lambda x: x * WEIGHTS.astype("int32"))(x),
    ],
)
def test_conversions_of_values_that_are_not_transposed_are_allowed(function):
    transposed = trace(function, jnp.arange(4)).apply("linear_transpose")
    cotangents = jnp.arange(1, 1 + len(function(jnp.arange(4))))
    expected = jax.linear_transpose(function, jnp.arange(4))(cotangents)
    np.testing.assert_array_equal(transposed(cotangents), expected)


def test_a_conversion_in_a_call_that_loses_cotangents_is_refused():
    function = jax.jit(lambda x: x.astype("float32").astype("int32"))
    with pytest.raises(UnsupportedError, match=r"convert_element_type in jit at .* loses"):
        trace(lambda x: function(x), jnp.arange(4)).apply("linear_transpose")


def test_a_transpose_may_be_by_some_arguments_only():
    program = trace(lambda x, y, *, s: (jnp.sin(x) * y, {"a": s * y}), 2.0, 3.0, s=4.0)
    by_y = program.apply("linear_transpose(argnums=1)")
    assert by_y.arg_names == ("x", "cotangents[0]", "cotangents[1]['a']", "s")
    assert jnp.isclose(by_y(2.0, (1.0, {"a": 2.0}), s=4.0), jnp.sin(2.0) + 8.0)
    assert by_y.out_names == ("result",)
    assert program.apply("linear_transpose(argnums=(-1,))").out_names == ("result[0]",)


def test_the_transpose_of_linearize_is_vjp():
    def fun(x, i):
        return jnp.sin(x) * i, i

    parts = trace(fun, 2.0, 3).apply("linearize, backward.linear_transpose(argnums=1)")
    _, residuals = parts["forward"](2.0, 3)
    nothing = np.zeros((), jax.dtypes.float0)
    pulled = parts["backward"](residuals, (1.0, nothing))
    expected = jax.vjp(fun, 2.0, 3)[1]((1.0, nothing))
    assert pulled[0] == expected[0] and pulled[1].dtype == expected[1].dtype == nothing.dtype


@pytest.mark.parametrize(
    ("fun", "args", "argnums", "error", "says"),
    [
        (lambda x: x, (True,), None, ArgumentsError, r"numbers, but x is bool\[\]"),
        (lambda k: k, (jax.random.key(0),), None, ArgumentsError, "numbers, but k is key"),
        (lambda x: x * 2.0, (1,), None, ArgumentsError, r"x is i32\[\] and result is f32\[\]"),
        (lambda x: x, (1,), (0, -1), ArgumentsError, "argument of lambda twice"),
        (lambda x: x, (1,), (), ArgumentsError, "argnums names no argument of lambda"),
        (lambda x: jnp.eye(3, dtype=int) @ x, (jnp.arange(3),), None, UnsupportedError, "dot_gen"),
        (lambda x: x + jnp.int32(1) * x, (1,), None, UnsupportedError, r"type at .*\.py:\d+ loses"),
        (lambda x: x // 2, (1,), None, UnsupportedError, r"type in jit at .*\.py:\d+ loses"),
        (lambda x, y: x * y, (1.0, 2.0), None, UnsupportedError, r"at \S*linear.py:\d+: JAX's"),
    ],
)
def test_functions_without_a_transpose_are_refused(fun, args, argnums, error, says):
    with pytest.raises(error, match=says):
        trace(fun, *args).apply(LinearTranspose(argnums))


def test_a_program_that_is_not_linear_has_no_transpose():
    with pytest.raises(UnsupportedError, match=r"at \S*test_linear.py:\d+: .*sin") as raised:
        trace(lambda x: jnp.sin(x), 1.0).apply("linear_transpose")
    assert "argnums" in raised.value.hint


def test_a_while_loop_has_no_reverse_mode():
    with pytest.raises(UnsupportedError, match=r"vjp of .* Reverse-mode"):
        trace(lambda x: jax.lax.while_loop(lambda c: c < 3, jnp.exp, x), 1.0).apply("vjp")


def test_vjp_differentiates_the_arguments_of_argnums():
    program = trace(lambda w, x, y: jnp.sin(x @ w).sum() * y, jnp.ones((3, 2)), jnp.ones(3), 2.0)
    _, pull = jax.vjp(program, jnp.ones((3, 2)), jnp.ones(3), 2.0)
    for argnums, expected in [(0, pull(1.0)[0]), ((2, 0), pull(1.0)[::-2])]:
        halves = Vjp(argnums=argnums)(program)
        _, kept = halves["forward"](jnp.ones((3, 2)), jnp.ones(3), 2.0)
        found = halves["backward"](kept, jnp.float32(1.0))
        jax.tree.map(np.testing.assert_allclose, found, expected)
    with pytest.raises(ArgumentsError, match="no positional argument 3 for argnums"):
        Vjp(argnums=3)(program)
