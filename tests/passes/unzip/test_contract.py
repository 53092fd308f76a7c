"""The contract of `unzip`, point by point: how a function with variables is split.

Any argument can be a key to `unzip`. Where that reads better, a key is a plain array here.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import Program, jaxcompat, nest, sow, trace, unzip, variable
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.passes import Pipeline
from jaxprtool.passes.unzip import Unzip, UnzipError

ONES = jnp.ones(5)
KEY = jax.random.key(0)


def assert_tree(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected), actual
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, expected)


def assert_unzips(init, apply, keys, variables, args, result) -> None:
    """Assert that both are well typed, and check the variables of init and the result of apply."""
    for program in init, apply:
        assert isinstance(program, Program)
        type_check(program)
    assert_tree(init(*keys), variables)
    assert_tree(apply(variables, *args), result)


def primitives(program: Program) -> list[str]:
    """Return the primitives of a program's equations, at every depth."""
    return [e.primitive.name for e in equations(jaxcompat.open_jaxpr(program.jaxpr))]


def dense(key, x):
    w = variable(jax.random.normal(key, (x.shape[-1], 2)), name="w")
    return x @ w


# --- keys, variables, and the two programs ------------------------------------------------------


def test_init_takes_the_key_and_apply_the_variables_and_the_other_arguments():
    x = jnp.arange(6.0).reshape(2, 3)
    init, apply = unzip(dense)(KEY, x)
    w = jax.random.normal(KEY, (3, 2))
    assert_unzips(init, apply, [KEY], {"w": w}, [x], x @ w)
    assert "random_bits" not in primitives(apply)
    assert "dot_general" not in primitives(init)


def test_apply_can_use_other_variables_than_those_of_init():
    x = jnp.ones((1, 3))
    _, apply = unzip(dense)(KEY, x)
    assert_tree(apply({"w": jnp.full((3, 2), 2.0)}, x), jnp.full((1, 2), 6.0))


def test_init_of_another_key_returns_other_variables():
    x = jnp.ones((1, 3))
    init, apply = unzip(dense)(KEY, x)
    other = jax.random.key(1)
    assert_tree(apply(init(other), x), dense(other, x))


def test_keys_may_be_raw():
    key, x = jax.random.PRNGKey(3), jnp.ones((1, 3))
    init, apply = unzip(dense)(key, x)
    assert_tree(apply(init(key), x), dense(key, x))


def test_arguments_may_be_types_only():
    x = jax.ShapeDtypeStruct((1, 3), jnp.float32)
    init, apply = unzip(dense)(jax.eval_shape(lambda: jax.random.key(0)), x)
    assert_tree(apply(init(KEY), jnp.ones((1, 3))), dense(KEY, jnp.ones((1, 3))))


def test_a_variable_that_is_its_key():
    init, apply = unzip(lambda x: variable(x, name="x"))(ONES)
    assert_unzips(init, apply, [ONES], {"x": ONES}, [], ONES)


def test_equations_after_a_variable_are_in_apply_only():
    init, apply = unzip(lambda x: variable(x + 1, name="x") + 1)(ONES)
    assert_unzips(init, apply, [ONES], {"x": 2 * ONES}, [], 3 * ONES)
    assert (primitives(init).count("add"), primitives(apply).count("add")) == (1, 1)


@pytest.mark.parametrize("number", [0, 1])
def test_key_args_names_the_key_argument(number):
    def f(x, y):
        sown = variable((x, y)[number] + 1, name="x")
        return sown + (y, x)[number]

    init, apply = unzip(f, key_args=number)(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"x": 2 * ONES}, [ONES], 3 * ONES)
    with pytest.raises(UnzipError, match="do not cut"):
        unzip(f, key_args=1 - number)(ONES, ONES)


@pytest.mark.parametrize("number, name", [(0, "x"), (1, "y")])
def test_a_value_that_depends_on_other_arguments_is_not_a_variable(number, name):
    def f(x, y):
        return variable(x, name="x") + variable(y, name="y")

    init, apply = unzip(f, key_args=number)(ONES, 2 * ONES)
    assert_unzips(init, apply, [ONES], {name: ONES}, [3 * ONES], 4 * ONES)
    assert primitives(apply).count("sow") == 1


def test_several_keys_in_the_order_of_the_arguments():
    def f(a, x, b):
        return variable(a - b, name="d") + x

    init, apply = unzip(f, key_args=(2, 0))(5 * ONES, ONES, 2 * ONES)
    assert_unzips(init, apply, [5 * ONES, 2 * ONES], {"d": 3 * ONES}, [ONES], 4 * ONES)


def test_a_negative_key_arg_counts_from_the_end():
    init, apply = unzip(lambda x, k: variable(k, name="k") + x, key_args=-1)(ONES, 2 * ONES)
    assert_unzips(init, apply, [2 * ONES], {"k": 2 * ONES}, [ONES], 3 * ONES)


def test_a_key_may_be_a_pytree():
    def f(keys, x):
        return variable(keys["a"] + keys["b"], name="v") * x

    keys = {"a": ONES, "b": 2 * ONES}
    init, apply = unzip(f)(keys, ONES)
    assert_unzips(init, apply, [keys], {"v": 3 * ONES}, [ONES], 3 * ONES)


def test_keyword_arguments_stay_arguments_of_apply():
    def f(key, x, *, scale):
        return variable(key, name="v") * x * scale["by"]

    init, apply = unzip(f)(ONES, ONES, scale={"by": 3.0})
    assert_tree(init(ONES), {"v": ONES})
    assert_tree(apply({"v": 2 * ONES}, ONES, scale={"by": 4.0}), 8 * ONES)


def test_a_value_of_constants_only_is_a_variable():
    def f(key, x):
        w = variable(key, name="w")
        return w * x + variable(jnp.zeros(5), name="b")

    init, apply = unzip(f)(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"w": ONES, "b": 0 * ONES}, [ONES], ONES)
    assert_tree(apply({"w": ONES, "b": 7 * ONES}, ONES), 8 * ONES)


def test_captured_arrays_are_constants():
    table = jnp.arange(5.0)
    init, apply = unzip(lambda key, x: variable(key * table, name="t") + x + table)(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"t": table}, [ONES], 2 * table + 1)


def test_an_unused_variable_is_a_variable():
    def f(key, x):
        variable(key + 1, name="unused")
        return x

    init, apply = unzip(f)(ONES, ONES)
    assert_tree(init(ONES), {"unused": 2 * ONES})
    assert_tree(apply({"unused": 5 * ONES}, ONES), ONES)


def test_a_variable_computed_from_another_starts_from_its_initial_value():
    def f(key):
        a = variable(key + 1, name="a")
        return variable(a * 2, name="b") + a

    init, apply = unzip(f)(ONES)
    assert_unzips(init, apply, [ONES], {"a": 2 * ONES, "b": 4 * ONES}, [], 6 * ONES)
    assert_tree(apply({"a": 10 * ONES, "b": ONES}), 11 * ONES)


def test_a_value_sown_under_two_names_is_two_variables():
    def f(key):
        return variable(variable(key, name="a"), name="b")

    init, apply = unzip(f)(ONES)
    assert_tree(init(ONES), {"a": ONES, "b": ONES})
    assert_tree(apply({"a": 2 * ONES, "b": 3 * ONES}), 3 * ONES)


def test_variables_are_any_pytree():
    def f(key, y):
        params = variable({"a": key, "b": (key + 1, None)}, name="ab")
        return params["a"] + params["b"][0] + y

    init, apply = unzip(f)(ONES, ONES)
    variables = {"ab": {"a": ONES, "b": (2 * ONES, None)}}
    assert_unzips(init, apply, [ONES], variables, [ONES], 4 * ONES)


def test_a_pytree_with_a_late_leaf_is_not_a_variable():
    def f(key, x):
        pair = sow((x, jnp.zeros(5)), tag="variable", name="pair")
        return pair[0] + pair[1] + variable(key, name="v")

    init, apply = unzip(f)(ONES, ONES)
    assert_tree(init(ONES), {"v": ONES})
    assert_tree(apply({"v": ONES}, ONES), 2 * ONES)
    assert "sow" in primitives(apply)


def test_a_variable_without_leaves_is_kept_in_its_place():
    def f(key):
        return variable(key, name="v"), variable((), name="nothing")

    init, apply = unzip(f)(ONES)
    assert_unzips(init, apply, [ONES], {"v": ONES, "nothing": ()}, [], (ONES, ()))


def test_results_keep_their_structure_and_names():
    def f(key, x):
        return {"y": variable(key, name="v") + x, "x": (x, 1.0, None)}

    init, apply = unzip(f)(ONES, ONES)
    assert_tree(apply(init(ONES), ONES), {"y": 2 * ONES, "x": (ONES, 1.0, None)})
    assert apply.out_names == trace(f, ONES, ONES).out_names
    assert apply.arg_names[1:] == ("x",)
    assert init.arg_names == ("key",)


def test_programs_are_named_after_the_function():
    init, apply = unzip(dense)(KEY, jnp.ones((1, 3)))
    assert (init.name, apply.name) == ("dense_init", "dense_apply")


# --- nothing to split ---------------------------------------------------------------------------


def test_a_function_without_arguments():
    init, apply = unzip(lambda: None)()
    assert init() == {}
    assert apply({}) is None


def test_without_variables_and_keys_apply_is_the_function():
    init, apply = unzip(jnp.sin, key_args=None)(ONES)
    assert_unzips(init, apply, [], {}, [ONES], jnp.sin(ONES))


def test_without_keys_sown_values_stay_sown():
    init, apply = unzip(lambda x: variable(x + 1, name="x") + 1, key_args=None)(ONES)
    assert_unzips(init, apply, [], {}, [ONES], 3 * ONES)
    assert primitives(apply).count("sow") == 1


def test_an_unused_key():
    init, apply = unzip(lambda key, x: jnp.sin(x))(KEY, ONES)
    assert_unzips(init, apply, [KEY], {}, [ONES], jnp.sin(ONES))


# --- what cannot be split -----------------------------------------------------------------------


def test_an_output_that_needs_a_key_is_refused_with_the_path_to_it():
    def f(key, x):
        w = variable(jax.random.normal(key, (5,)), name="w")
        noise = jax.random.uniform(key, (5,))
        return w + x, noise * x

    with pytest.raises(ValueError, match=r"Variables do not cut dependence graph\.") as caught:
        unzip(f)(KEY, ONES)
    assert isinstance(caught.value, UnzipError) and isinstance(caught.value, JaxprToolError)
    message = caught.value.message
    path = message.partition("dependence graph.")[2].split(" -> ")
    assert path[0].strip() == "key"
    assert path[-1].strip() == "result[1]"
    assert any("mul at" in step and "test_contract.py:" in step for step in path)


def test_a_long_path_along_one_line_is_cut_in_its_middle():
    def f(key, x):
        noise = jax.random.uniform(key, (5,))
        return functools.reduce(lambda y, _: jnp.sin(y), range(300), noise) * x

    with pytest.raises(UnzipError, match=r"sin, sin, \(\d+ more\), sin") as caught:
        unzip(f)(KEY, ONES)
    assert len(caught.value.message) < 1000


def test_a_result_that_is_the_key_itself_is_refused():
    with pytest.raises(ValueError, match=r"Variables do not cut dependence graph\..*x -> result"):
        unzip(lambda x: x)(ONES)


def test_the_path_in_an_error_leads_through_calls_and_loops():
    def f(key, x):
        @jax.jit
        def noisy(c, _):
            return c + jax.random.normal(key, (5,)), None

        return jax.lax.scan(noisy, x, length=3)[0]

    with pytest.raises(ValueError, match="do not cut dependence graph") as caught:
        unzip(f)(KEY, ONES)
    assert "scan at" in caught.value.message
    assert caught.value.message.rstrip().endswith("result")


def test_a_value_sown_under_another_tag_is_not_a_variable():
    def f(key, x):
        return sow(key, tag="other", name="v") + x

    with pytest.raises(ValueError, match="do not cut dependence graph"):
        unzip(f)(ONES, ONES)


def test_values_sown_under_another_tag_stay_sown():
    def f(key, x):
        w = variable(sow(key * 2, tag="other", name="early"), name="w")
        return sow(w * x, tag="other", name="late")

    init, apply = unzip(f)(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"w": 2 * ONES}, [ONES], 2 * ONES)
    for program, name in (init, "early"), (apply, "late"):
        eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
        assert [e.params["name"] for e in eqns if e.primitive.name == "sow"] == [name]


def test_another_tag_can_be_chosen():
    def f(key, x):
        return sow(variable(key, name="v") + 1, tag="state", name="s") + x

    init, apply = unzip(f, tag="state")(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"s": 2 * ONES}, [ONES], 3 * ONES)


def test_a_tag_of_none_is_refused():
    with pytest.raises(ValueError, match="tag"):
        unzip(dense, tag=None)(KEY, jnp.ones((1, 3)))
    with pytest.raises(ValueError, match="tag"):
        sow(ONES, tag=None, name="x")


def test_a_variable_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"Must provide name for variable\.") as caught:
        unzip(lambda x: variable(x, name=None))(ONES)
    assert "test_contract.py:" in str(caught.value)


def test_a_sown_value_without_a_name_that_is_not_a_variable_is_allowed():
    def f(key, x):
        return variable(key, name="v") + variable(x, name=None)

    init, apply = unzip(f)(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"v": ONES}, [ONES], 2 * ONES)


def test_a_duplicate_name_is_refused():
    def f(x):
        return variable(x, name="y") + variable(x + 1, name="y")

    with pytest.raises(ValueError, match="Cannot use duplicate variable name: y") as caught:
        unzip(f)(ONES)
    assert isinstance(caught.value, UnzipError)
    assert str(caught.value).count("test_contract.py:") == 2


@pytest.mark.parametrize("number", [2, -3])
def test_a_key_arg_without_an_argument_is_refused(number):
    with pytest.raises(JaxprToolError, match=rf"{number}"):
        unzip(dense, key_args=number)(KEY, jnp.ones((1, 3)))


def test_apply_refuses_other_arguments_than_a_dict_of_the_variables():
    _, apply = unzip(dense)(KEY, jnp.ones((1, 3)))
    with pytest.raises(TypeError, match=r"variables\['w'\] is missing"):
        apply({"v": jnp.ones((3, 2))}, jnp.ones((1, 3)))


# --- modes --------------------------------------------------------------------------------------


def test_append_returns_a_list_of_the_values_in_order():
    def f(key, x):
        for i in range(3):
            x = x * sow(key + i, tag="variable", name="w", mode="append")
        return x

    init, apply = unzip(f)(ONES, ONES)
    variables = {"w": [ONES, 2 * ONES, 3 * ONES]}
    assert_unzips(init, apply, [ONES], variables, [ONES], 6 * ONES)
    assert_tree(apply({"w": [ONES, ONES, 5 * ONES]}, ONES), 5 * ONES)


def test_one_value_appended_is_a_list_of_one():
    init, apply = unzip(lambda k: sow(k, tag="variable", name="w", mode="append"))(ONES)
    assert_unzips(init, apply, [ONES], {"w": [ONES]}, [], ONES)


def test_clobber_keeps_the_last_value():
    def f(key, x):
        a = sow(jnp.zeros(5), tag="variable", name="w", mode="clobber")
        b = sow(key, tag="variable", name="w", mode="clobber")
        return a + b * x

    init, apply = unzip(f)(ONES, ONES)
    assert_unzips(init, apply, [ONES], {"w": ONES}, [ONES], ONES)
    assert_tree(apply({"w": 2 * ONES}, 3 * ONES), 6 * ONES)


def test_a_clobbered_value_does_not_cut():
    def f(key):
        a = sow(key, tag="variable", name="w", mode="clobber")
        return a, sow(key + 1, tag="variable", name="w", mode="clobber")

    with pytest.raises(ValueError, match="do not cut dependence graph"):
        unzip(f)(ONES)


@pytest.mark.parametrize(
    "modes", [("strict", "append"), ("append", "strict"), ("clobber", "append")]
)
def test_different_modes_under_one_name_are_refused(modes):
    def f(key):
        return [sow(key, tag="variable", name="w", mode=mode) for mode in modes]

    with pytest.raises(ValueError, match="Cannot use duplicate variable name: w"):
        unzip(f)(ONES)


# --- scopes -------------------------------------------------------------------------------------


def single(x):
    return variable(x, name="x")


def test_nest_puts_variables_under_its_scope():
    init, apply = unzip(nest(single, scope="f"))(ONES)
    assert_unzips(init, apply, [ONES], {"f": {"x": ONES}}, [], ONES)
    assert_tree(apply({"f": {"x": 2 * ONES}}), 2 * ONES)


def test_scopes_side_by_side():
    def f(x):
        y = nest(single, scope="f1")(x + 1)
        return nest(single, scope="f2")(y + 1)

    init, apply = unzip(f)(ONES)
    assert_tree(init(ONES), {"f1": {"x": 2 * ONES}, "f2": {"x": 3 * ONES}})
    assert_tree(apply({"f1": {"x": 4 * ONES}, "f2": {"x": 100 * ONES}}), 100 * ONES)


def test_nested_scopes_with_names_in_them():
    def inner(key):
        return variable(key, name="w") + nest(single, scope="deep")(key)

    def f(key):
        return variable(key, name="w") + nest(inner, scope="layer")(key)

    init, apply = unzip(f)(ONES)
    variables = {"w": ONES, "layer": {"w": 2 * ONES, "deep": {"x": 3 * ONES}}}
    assert jax.tree.structure(init(ONES)) == jax.tree.structure(variables)
    assert_tree(apply(variables), 6 * ONES)


def test_the_same_name_twice_under_one_scope_is_refused():
    def f(key):
        return nest(single, scope="s")(key) + nest(single, scope="s")(key + 1)

    with pytest.raises(ValueError, match="Cannot use duplicate variable name: s/x"):
        unzip(f)(ONES)


@pytest.mark.parametrize("scope_first", [True, False])
def test_a_scope_and_a_variable_of_one_name_are_refused(scope_first):
    def f(key):
        parts = [nest(single, scope="s"), lambda k: variable(k, name="s")]
        return [part(key) for part in (parts if scope_first else parts[::-1])]

    with pytest.raises(ValueError, match="Cannot use duplicate variable name: s"):
        unzip(f)(ONES)


# --- nested unzip ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number, names", [(0, "xy"), (1, "yx")])
def test_a_partially_applied_apply_unzips_again(number, names):
    def f(x, y):
        return variable(x, name="x") + variable(y, name="y")

    init, apply = unzip(f, key_args=number)(ONES, ONES)
    first = init(ONES)
    assert list(first) == [names[0]]
    again = unzip(functools.partial(apply, first))(ONES)
    assert_unzips(*again, [ONES], {names[1]: ONES}, [], 2 * ONES)


def test_unzip_inside_a_jitted_function_that_is_unzipped():
    def outer(x):
        @jax.jit
        def inner(y):
            return variable(y, name="inner")

        init, _ = unzip(inner)(x + 1)
        return variable(init(x + 1), name="outer")

    assert_tree(outer(1.0), {"inner": 2.0})
    init, apply = unzip(outer)(1.0)
    assert_unzips(init, apply, [1.0], {"outer": {"inner": 2.0}}, [], {"inner": 2.0})


def test_names_of_nested_unzips_do_not_collide():
    @jax.jit
    def nested(x):
        init, _ = unzip(lambda x: variable(x + 1, name="x"))(x)
        result = init(x)

        @jax.jit
        def inner(x, result):
            return variable(result["x"], name="x") + variable(x + 1, name="x2")

        init, _ = unzip(inner)(x, result)
        return variable(init(x), name="r")

    assert_tree(nested(1.0), {"x2": 2.0})
    init, apply = unzip(nested)(1.0)
    assert_unzips(init, apply, [1.0], {"r": {"x2": 2.0}}, [], {"x2": 2.0})


@pytest.mark.proof
def test_both_halves_can_be_used_inside_a_function_that_is_unzipped():
    def f(key, x):
        init, apply = unzip(dense)(key, x)
        return apply(variable(init(key), name="layer"), x)

    x = jnp.ones((1, 3))
    init, apply = unzip(f)(KEY, x)
    w = jax.random.normal(KEY, (3, 2))
    assert_unzips(init, apply, [KEY], {"layer": {"w": w}}, [x], x @ w)


# --- transformations of the two programs ----------------------------------------------------------


@pytest.mark.proof
def test_init_is_vmapped_and_apply_differentiated_under_jit():
    x = jnp.arange(3.0)[None]
    init, apply = unzip(dense)(KEY, x)
    keys = jax.random.split(KEY, 4)
    many = jax.jit(jax.vmap(init))(keys)
    assert_tree(many["w"], jnp.stack([init(k)["w"] for k in keys]))

    def loss(variables):
        return (apply(variables, x) ** 2).sum()

    w = many["w"][2]
    expected = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    assert_tree(jax.jit(jax.grad(loss))({"w": w}), {"w": expected})


def test_jvp_of_apply_and_jit_of_init():
    x = jnp.ones((1, 3))
    init, apply = unzip(dense)(KEY, x)
    variables = jax.jit(init)(KEY)
    tangents = {"w": jnp.ones((3, 2))}
    _, out = jax.jvp(lambda v: apply(v, x), (variables,), (tangents,))
    assert_tree(out, jnp.full((1, 2), 3.0))


def test_unzip_is_a_pass_in_a_pipeline():
    x = jnp.ones((1, 3))
    programs = Pipeline.parse("unzip(key_args=0), apply.dce")(trace(dense, KEY, x))
    assert list(programs) == ["init", "apply"]
    assert_tree(programs["apply"](programs["init"](KEY), x), dense(KEY, x))


def test_the_pass_returns_the_same_as_the_function():
    x = jnp.ones((1, 3))
    programs = Unzip(key_args=0)(trace(dense, KEY, x))
    init, apply = unzip(dense)(KEY, x)
    assert str(programs["init"].jaxpr) == str(init.jaxpr)
    assert str(programs["apply"].jaxpr) == str(apply.jaxpr)


def test_dead_code_is_in_neither_half():
    def f(key, x):
        unused = jnp.cos(x), jnp.tanh(key)
        return variable(key, name="v") + x + 0 * unused[1].shape[0]

    init, apply = unzip(f)(ONES, ONES)
    assert "cos" not in primitives(apply)
    assert "tanh" not in primitives(init) + primitives(apply)


def test_without_variables_unzip_changes_nothing():
    def f(key, x):
        y = jax.jit(jnp.sin)(x)
        return jax.lax.scan(lambda c, _: (c * y, c), x, length=3)

    init, apply = unzip(f)(KEY, ONES)
    assert str(apply.jaxpr.eqns) == str(trace(f, KEY, ONES).jaxpr.eqns)
    assert not init.jaxpr.eqns
