"""trace returns make_jaxpr's jaxpr with names and trees, and attributes errors."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.errors import ArgumentsError, UserFunctionError, user_traceback
from jaxprtool.ir.program import type_check
from jaxprtool.ir.rewrite import as_constants
from jaxprtool.ir.trees import unique
from jaxprtool.loading import static
from jaxprtool.loading.trace import trace

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def loss(params, x, *rest, scale=3, **options):
    return {"loss": params["w"] @ x, "rest": (rest, options)}


@jax.jit
def jitted(x):
    return jnp.sin(x) * 2


@functools.partial(jax.jit, static_argnums=1, static_argnames="flag")
def with_statics(x, n, *, flag):
    return x * n[0] if flag else x


@jax.custom_jvp
def custom(x):
    return jnp.sin(x)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))


class Model:
    def __init__(self):
        self.w = np.ones(3, np.float32)

    def __call__(self, x):
        return self.w @ x

    def apply(self, x):
        return x + self.w


class Unhashable(Model):
    __hash__ = None  # type: ignore[assignment]


def fault(kind, fun, *args, **kwargs):
    with pytest.raises(kind) as caught:
        trace(fun, *args, **kwargs)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == (3 if kind is UserFunctionError else 2)
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (jitted, (X,)),
        (custom, (X,)),
        (Model(), (X,)),
        (Unhashable(), (X,)),
        (Model().apply, (X,)),
        (functools.partial(loss, {"w": np.ones(3)}), (X, 1, 2.5)),
        (jax.grad(lambda x: jnp.sum(x**2)), (X,)),
        (jax.vmap(jnp.sin), (X,)),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x), (X,)),
        (lambda: jnp.arange(3), ()),
        (lambda tree: tree["a"][0] + 1, ({"b": None, "a": [X, True]},)),
        (jnp.add, (1, 2.0)),
    ],
)
def test_the_jaxpr_is_that_of_make_jaxpr(fun, args):
    program = trace(fun, *args)
    of_jax = fun.trace(*args).jaxpr if hasattr(fun, "trace") else jax.make_jaxpr(fun)(*args)
    assert str(program.jaxpr) == str(as_constants(of_jax))
    type_check(program)


def test_names_and_trees_of_arguments_and_results():
    program = trace(loss, {"w": X, "b": 1}, X, 1, (2,), scale=4, other={"z": 5.0})
    assert program.name == "loss"
    assert program.arg_names == (
        *("params['b']", "params['w']", "x", "rest[0]", "rest[1][0]"),
        *("options['other']['z']", "scale"),
    )
    assert program.out_names == (
        *("result['loss']", "result['rest'][0][0]", "result['rest'][0][1][0]"),
        "result['rest'][1]['other']['z']",
    )
    args, kwargs = jax.tree.unflatten(program.in_tree, range(7))
    assert args == ({"b": 0, "w": 1}, 2, 3, (4,))
    assert kwargs == {"other": {"z": 5}, "scale": 6}
    out = jax.tree.unflatten(program.out_tree, range(4))
    assert out == {"loss": 0, "rest": ((1, (2,)), {"other": {"z": 3}})}


def test_the_program_returns_the_results_of_the_function():
    params, x = {"w": jnp.arange(3.0)}, jnp.ones(3)
    program = trace(loss, params, x, 7, key=2.0)
    result = program(params, x, 7, key=2.0)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, result, loss(params, x, 7, key=2.0)))


@pytest.mark.parametrize(
    ("fun", "name", "arg"),
    [
        (loss, "loss", None),
        (jitted, "jitted", "x"),
        (custom, "custom", "x"),
        (functools.partial(functools.partial(loss, {"w": np.ones(3)})), "loss", "x"),
        (Model(), "Model", "x"),
        (functools.partial(Model()), "Model", "x"),
        (Model().apply, "apply", "x"),
        (lambda y: y, "lambda", "y"),
        (jnp.add, "add", "args[0]"),
        (jax.lax.sin_p.bind, "bind", "args[0]"),
    ],
)
def test_every_callable_has_a_name_and_so_have_its_arguments(fun, name, arg):
    count = 2 if fun is jnp.add else 1
    args = ({"w": X}, X) if fun is loss else (X,) * count
    program = trace(fun, *args)
    assert program.name == name
    assert arg is None or program.arg_names[0] == arg
    assert len(program.arg_names) == len(program.jaxpr.invars)


def test_names_are_unique():
    assert unique(["x", "x", "y", "x", "x_2"]) == ("x", "x_2", "y", "x_3", "x_2_2")


# --- static arguments


def scaled(x, names, y):
    return x * len(names) + y


@pytest.mark.parametrize(
    ("args", "kwargs", "options"),
    [
        ((X, static([1, 2]), X), {}, {}),
        ((X, [1, 2], X), {}, {"static_argnums": 1}),
        ((X, [1, 2], X), {}, {"static_argnums": (-2,)}),
        ((X, [1, 2], X), {}, {"static_argnames": "names"}),
        ((X, [1, 2]), {"y": X}, {"static_argnames": ["names"]}),
        ((X,), {"names": "ab", "y": X}, {"static_argnums": [1]}),
        ((X,), {"names": static({1: 2, 3: 4}), "y": X}, {}),
    ],
)
def test_static_arguments_reach_the_function_unchanged(args, kwargs, options):
    program = trace(scaled, *args, **kwargs, **options)
    assert program.arg_names == ("x", "y")
    assert program.in_tree.num_leaves == 2
    assert str(program.jaxpr) == str(jax.make_jaxpr(lambda x, y: scaled(x, "ab", y))(X, X))
    type_check(program)


def test_static_arguments_of_a_jitted_function_see_the_value():
    program = trace(with_statics, X, static((2,)), flag=static(True))
    assert [e.primitive.name for e in program.jaxpr.eqns] == ["mul"]
    for options in ({}, {"static_argnums": 1, "static_argnames": "flag"}):
        again = trace(with_statics, X, (2,), flag=True, **options)
        assert str(again.jaxpr) == str(program.jaxpr)
    outer = lambda x, shape: with_statics(x, shape, flag=True)  # noqa: E731
    assert "write static(...) around it" in fault(UserFunctionError, outer, X, (2,))


def test_invalid_static_positions_are_refused():
    assert "static_argnums has 7" in fault(ArgumentsError, scaled, X, 1, X, static_argnums=7)
    assert "static_argnames has 'nmaes', which is not a parameter | did you mean 'names'?" in fault(
        ArgumentsError, scaled, X, 1, X, static_argnames="nmaes"
    )


def test_axis_env_names_axes():
    program = trace(lambda x: jax.lax.psum(x, "i"), X, axis_env=[("i", 4)])
    expected = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 4)])(X)
    assert str(program.jaxpr) == str(expected)
    assert "raised NameError" in fault(UserFunctionError, lambda x: jax.lax.psum(x, "i"), X)


def test_parameters_of_a_function_may_have_any_name():
    assert trace(lambda fun, name, call: fun, fun=1, name=2, call=3).arg_names == (
        *("call", "fun", "name"),
    )


# --- mistakes


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (
            (X,),
            {},
            "the arguments do not fit scaled(x, names, y): missing a required argument: 'na",
        ),
        ((X, X, X, X), {}, "do not fit scaled(x, names, y): too many positional arguments"),
        ((X, X, X), {"z": X}, "do not fit scaled(x, names, y): got an unexpected keyword arg"),
        ((X, X, np.array(["b"])), {}, "argument y is an array of dtype <U1, which JAX does not"),
        ((X, X, 2**40), {}, "argument y is 1099511627776, too large for its type | --x64"),
        ((X, X, {1: X, "a": X}), {}, "argument y is not a pytree"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, kwargs, expected):
    assert expected in fault(ArgumentsError, scaled, *args, **kwargs)


def test_a_view_of_a_ref_is_refused_as_an_argument():
    def row(a):
        return a[...]

    view = jax.jit(lambda ref: fault(ArgumentsError, row, ref.at[0]) and ref[...])
    view(jax.new_ref(jnp.ones((2, 3))))


def branch(x):
    if x > 0:
        return x
    return -x


def leave(x):
    sys.exit(3)


def mismatched(x):
    return jax.lax.scan(lambda c, _: (c.astype(int), None), x, None, length=2)


@pytest.mark.parametrize(
    ("fun", "args", "expected"),
    [
        (
            jnp.dot,
            (X, jax.ShapeDtypeStruct((4,), jnp.float32)),
            "dot raised TypeError: dot_general",
        ),
        (branch, (1.0,), "branch raised TracerBoolConversionError: Attempted boolean conversion"),
        (leave, (1.0,), "leave called sys.exit(3) while it was traced"),
        (mismatched, (1.0,), "carry c has type float32[] but the corresponding output carry"),
        (lambda x: {}["a"], (1.0,), "lambda raised KeyError: 'a'"),
    ],
)
def test_errors_of_the_function_are_its_own(fun, args, expected):
    message = fault(UserFunctionError, fun, *args)
    assert expected in message
    assert "https://" not in message


def test_the_users_frames_are_distinguished_from_jaxs():
    def inner(x):
        return x @ jnp.ones(4)

    with pytest.raises(UserFunctionError) as caught:
        trace(jax.jit(lambda x: jax.vmap(inner)(x)), jnp.ones((2, 3)))
    frames = user_traceback(caught.value)
    assert [f.name for f in frames] == ["<lambda>", "inner"]
    assert {f.filename for f in frames} == {__file__}
