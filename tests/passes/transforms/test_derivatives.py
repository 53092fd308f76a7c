"""grad, value_and_grad, jacfwd, jacrev, hessian and jvp: options, names, trees and errors."""

from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

import jaxprtool
from jaxprtool import trace
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import type_check

PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
X = jnp.ones((2, 3))


def loss(params, x, *, scale=2.0):
    return scale * jnp.tanh(x @ params["w"] + params["b"]).sum()


def with_aux(params, x):
    hidden = jnp.tanh(x @ params["w"])
    return hidden.sum(), {"hidden": hidden}


FUNCTIONS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
}


def test_a_gradient_has_the_equations_of_jax_in_their_order():
    def mixed(x):
        y = jnp.where(x > 0, jnp.sin(x) * x, x**3)
        return (jax.nn.softmax(y) @ jnp.cumsum(y) + jnp.sort(y)[1:].prod()) / y.max()

    x = jnp.arange(1.0, 5.0)
    program = trace(mixed, x)
    assert str(program.apply("grad").jaxpr) == str(jax.make_jaxpr(jax.grad(mixed))(x))
    # Numbers that are equal in Python, and not as parameters.
    powers = trace(lambda x: (x**2 + x**2.0 + jax.lax.reduce_precision(x, 8, 1)).sum(), x)
    assert powers.apply("grad")(x) == pytest.approx(4 * x + 1)


def test_jax_derives_equal_equations_once():
    derived = []
    twice = jax.extend.core.Primitive("twice_of_derivatives")
    twice.def_abstract_eval(lambda x, **_: x)

    @partial(ad.primitive_jvps.__setitem__, twice)
    def _(primals, tangents, **params):
        derived.append(params)
        return twice.bind(*primals, **params), twice.bind(*tangents, **params)

    def chain(x):
        for factor in (2, 2.0, True, 0.0, -0.0) * 3:
            x = twice.bind(x, factor=factor)
        return x

    trace(chain, 1.0).apply("linearize")
    assert [repr(params["factor"]) for params in derived] == ["2", "2.0", "True", "0.0", "-0.0"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_pass_returns_what_jax_traces(name):
    program = trace(loss, PARAMS, X, scale=3.0).apply(name)
    assert (
        structural_difference(program, trace(FUNCTIONS[name](loss), PARAMS, X, scale=3.0)) is None
    )
    assert program.name == "loss"
    assert program.arg_names == ("params['b']", "params['w']", "x", "scale")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("argnums", [1, (0, 1), (-1,)])
def test_argnums_are_those_of_jax(name, argnums):
    program = trace(loss, PARAMS, X).apply(f"{name}(argnums={argnums})")
    assert (
        structural_difference(program, trace(FUNCTIONS[name](loss, argnums=argnums), PARAMS, X))
        is None
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_aux_is_passed_through(name):
    program = trace(with_aux, PARAMS, X).apply(f"{name}(has_aux=True)")
    assert (
        structural_difference(program, trace(FUNCTIONS[name](with_aux, has_aux=True), PARAMS, X))
        is None
    )
    type_check(program)


def test_results_are_named_by_their_paths():
    assert trace(loss, PARAMS, X).apply("grad").out_names == ("result['b']", "result['w']")
    names = trace(with_aux, PARAMS, X).apply("value_and_grad(has_aux=True)").out_names
    assert names == ("result[0][0]", "result[0][1]['hidden']", "result[1]['b']", "result[1]['w']")


def test_transformations_can_be_chained():
    def cube(x):
        return x**3

    program = trace(cube, 2.0).apply("grad, grad, dce")
    assert program(2.0) == 12.0
    assert (
        structural_difference(
            trace(cube, 2.0).apply("grad, grad"), trace(jax.grad(jax.grad(cube)), 2.0)
        )
        is None
    )


@pytest.mark.proof
def test_holomorphic_functions_have_complex_derivatives():
    z = jnp.complex64(1 + 2j)
    program = trace(jnp.sin, z).apply("grad(holomorphic=True)")
    assert program(z) == jax.grad(jnp.sin, holomorphic=True)(z)
    program = trace(jnp.sin, z).apply("jacfwd(holomorphic=True)")
    assert program(z) == jax.jacfwd(jnp.sin, holomorphic=True)(z)


def test_integers_have_derivatives_of_dtype_float0_if_allowed():
    program = trace(lambda x, i: x * i, 2.0, 3).apply("grad(argnums=(0, 1), allow_int=True)")
    assert [aval.dtype for aval in program.out_avals] == [jnp.float32, jax.dtypes.float0]


def test_jvp_takes_primals_and_tangents_and_keywords():
    program = trace(loss, PARAMS, X, scale=2.0).apply("jvp")
    args = (PARAMS, X), (PARAMS, X)
    assert program.arg_names == (
        *("params['b']", "params['w']", "x"),
        *("d_params['b']", "d_params['w']", "d_x"),
        "scale",
    )
    assert program.out_names == ("result", "d_result")
    result, tangent = program(*args, scale=2.0)
    assert (result, tangent) == jax.jvp(loss, *args)


def test_jvp_takes_tangents_of_integers_only_as_float0():
    program = trace(lambda x, n: x * n, 2.0, 3).apply("jvp")
    none = np.zeros((), jax.dtypes.float0)
    assert program((2.0, 3), (1.0, none)) == (6.0, 3.0)
    for tangent, dtype in ((1, "i32"), (jnp.float32(1.5), "f32")):
        with pytest.raises(TypeError, match=rf"'d_n' is {dtype}\[\], but .* takes float0"):
            program((2.0, 3), (1.0, tangent))


def test_jvp_passes_aux_through():
    program = trace(with_aux, PARAMS, X).apply("jvp(has_aux=True)")
    args = (PARAMS, X), (PARAMS, X)
    direct = trace(lambda p, t: jax.jvp(with_aux, p, t, has_aux=True), *args)
    assert structural_difference(program, direct) is None
    assert program.out_names == ("result[0]", "d_result[0]", "result[1]['hidden']")


def test_a_program_from_a_file_has_its_custom_rules(tmp_path):
    @jax.custom_jvp
    def clipped(x):
        return jnp.maximum(x, 0)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 3 * tangents[0]))

    @jax.custom_vjp
    def twice(x):
        return jnp.sin(x)

    twice.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
    x = jnp.arange(4.0)
    program = trace(lambda x: (clipped(x) + twice(x)).sum(), x)
    jaxprtool.write(program, tmp_path / "f.jaxpr")
    gradient = jaxprtool.read(tmp_path / "f.jaxpr").apply("grad")
    assert jnp.array_equal(gradient(x), 3 + 2 * jnp.cos(x))


def test_free_axes_stay_free():
    program = trace(lambda x: jax.lax.psum(x**2, "i"), 3.0, axis_env=[("i", 4)]).apply("grad")
    assert program.axis_env == (("i", 4),)
    type_check(program)
    mapped = program.apply("batch(axis_name='i', axis_size=4)")
    expected = jax.vmap(jax.grad(lambda x: jax.lax.psum(x**2, "i")), axis_name="i")(jnp.arange(4.0))
    assert jnp.array_equal(mapped(jnp.arange(4.0)), expected)


def while_loop(x):
    return jax.lax.while_loop(lambda c: c < 3.0, lambda c: c * 2.0, x)


@pytest.mark.parametrize(
    ("fun", "args", "pipeline", "error", "says"),
    [
        (loss, (PARAMS, X), "grad(argnums=2)", ArgumentsError, "no positional argument 2 for arg"),
        (loss, (PARAMS, X), "grad(argnums=())", ArgumentsError, "argnums names no argument of"),
        (loss, (PARAMS, X), "hessian(argnums=())", ArgumentsError, "argnums names no argument of"),
        (loss, (PARAMS, X), "jacrev(argnums=(0, 0))", ArgumentsError, "an argument of loss twice"),
        (loss, (PARAMS, X), "jacfwd(argnums=(1, -1))", ArgumentsError, "an argument of loss twice"),
        (
            lambda i: i * 1.0,
            (3,),
            "grad",
            ArgumentsError,
            "real or complex arguments to differentiate, but i is i32",
        ),
        (
            lambda x: x,
            (X,),
            "grad",
            UnsupportedError,
            r"one number, but .* returns f32\[2,3\]",
        ),
        (
            lambda x: (x, [x]),
            (1.0,),
            "grad",
            UnsupportedError,
            r"one number, but lambda returns \(f32\[\], \[f32\[\]\]\)",
        ),
        (lambda x: [x] * 99, (1.0,), "grad", UnsupportedError, "lambda returns 99 arrays"),
        (loss, (PARAMS, X), "grad(has_aux=True)", ArgumentsError, "must return a pair"),
        (
            lambda x: jnp.int32(x),
            (1.0,),
            "grad",
            UnsupportedError,
            "real results, but result is i32",
        ),
        (lambda x: x * 1j, (1.0,), "jacrev", UnsupportedError, "real results, but result is c64"),
        (loss, (PARAMS, X), "grad(holomorphic=True)", ArgumentsError, "argument must be complex"),
        (lambda z: z.real, (1j,), "jacfwd(holomorphic=True)", ArgumentsError, "result must be com"),
        (
            lambda z: z,
            (1j,),
            "jacfwd",
            ArgumentsError,
            "real arguments to differentiate, but z is c64",
        ),
        (while_loop, (1.0,), "grad", UnsupportedError, r"at \S*derivatives.py:\d+: Reverse-mode"),
        (loss, (PARAMS, X), "grad(argnums='x')", PipelineError, "option 'argnums' of pass 'grad'"),
    ],
)
def test_mistakes_are_one_line_errors(fun, args, pipeline, error, says):
    with pytest.raises(error, match=says) as raised:
        trace(fun, *args).apply(pipeline)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_an_error_of_a_rule_of_jax_is_not_the_users(transform):
    program = trace(lambda a: jax.scipy.special.betainc(a, 1.0, 0.5), 2.0)
    with pytest.raises(UnsupportedError, match="Betainc gradient with respect to a"):
        program.apply(transform)


def test_errors_of_a_users_rule_are_passed_on():
    @jax.custom_vjp
    def broken(x):
        return x

    def backward(residuals, cotangent):
        raise KeyError("no such rule")

    broken.defvjp(lambda x: (x, None), backward)
    with pytest.raises(jaxprtool.errors.UserFunctionError, match=r"grad of .*KeyError"):
        trace(lambda x: broken(x), 1.0).apply("grad")


@pytest.mark.parametrize("pipeline", ["jvp", "linearize"])
def test_a_reverse_rule_has_no_forward_mode(pipeline):
    @jax.custom_vjp
    def fun(x):
        return jnp.sin(x)

    fun.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))
    program = trace(lambda x: fun(x), 2.0)
    assert program.apply("grad")(2.0) == 2.0
    with pytest.raises(UnsupportedError, match="no forward mode"):
        program.apply(pipeline)
