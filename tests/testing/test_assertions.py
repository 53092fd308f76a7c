"""Assertions about programs pass where they should, and otherwise name the user's lines."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError, UserFunctionError
from jaxprtool.testing import assert_budget, assert_donated, assert_equivalent, assert_no

HERE = "test_assertions.py"
W = jax.ShapeDtypeStruct((64, 64), "float32")
X = jax.ShapeDtypeStruct((8, 64), "float32")


def loss(w, x):
    hidden = jnp.tanh(x @ w)  # the product

    def body(carry, _):
        return jnp.sort(carry @ w), None  # three of them

    last, _ = jax.lax.scan(body, hidden, None, length=3)
    return (last**2).mean()


def line(text):
    """Return the line of this file that contains a text, as named in failures."""
    with open(__file__) as file:
        number = next(i for i, each in enumerate(file, 1) if each.rstrip().endswith(text))
    return f"{HERE}:{number}"


def failure(function, *args, **kwargs):
    with pytest.raises(AssertionError) as found:
        function(*args, **kwargs)
    return str(found.value)


# --- budgets --------------------------------------------------------------------------------------


def test_a_program_within_its_budgets_passes():
    assert_budget(
        loss, W, X, flops="1 MFLOP", peak_bytes="32KiB", equations=9, residual_bytes="40 KiB"
    )
    assert_budget(jaxprtool.trace(loss, W, X), flops=1_000_000, equations=9)


@pytest.mark.parametrize(
    ("budget", "says", "where"),
    [
        ({"flops": 100_000}, "takes 272.4 kFLOP, but the budget is 100.0 kFLOP", "# three of them"),
        ({"peak_bytes": "4KiB"}, "needs 22.0 KiB at its peak, but the budget is", "# three"),
        ({"equations": 8}, "has 9 equations, but the budget is 8 equations, 12.5% more", "# the"),
        ({"residual_bytes": 4096}, "of residuals, but the budget is 4.0 KiB", "# the product"),
    ],
)
def test_an_exceeded_budget_names_the_most_expensive_lines(budget, says, where):
    text = failure(assert_budget, loss, W, X, **budget)
    places = {"# the": "# the product", "# three": "# three of them"}
    assert text.startswith("loss ") and says in text
    assert line(places.get(where, where)) in text


def test_each_exceeded_budget_is_reported():
    text = failure(assert_budget, loss, W, X, flops=1, equations=1, peak_bytes="1GiB")
    assert "FLOP" in text and "9 equations" in text and "at its peak" not in text


def test_amounts_that_would_look_equal_are_shown_in_full():
    program = jaxprtool.trace(loss, W, X)
    flops = int(jaxprtool.cost(program).total.work.flops)
    assert_budget(program, flops=flops)
    assert f"takes {flops:,}, but the budget is {flops - 1:,}" in failure(
        assert_budget, program, flops=flops - 1
    )


@pytest.mark.proof
def test_the_compilations_of_a_call_are_counted_with_their_reasons():
    double = jax.jit(lambda x: 2 * x)

    def calls(x):
        double(x)
        double(x[:2])  # another shape
        double(x[:2])

    assert_budget(calls, jnp.ones(3), compiles=2)
    jax.clear_caches()
    text = failure(assert_budget, calls, jnp.ones(3), compiles=1)
    assert "calls compiled 2 programs, but the budget is 1 program" in text
    assert "x: f32[3] → f32[2]" in text and line("# another shape") in text


def test_a_function_that_cannot_be_traced_may_have_a_budget_of_compilations():
    @jax.jit
    def step(x):
        return x - 0.1 * x

    def train(x):
        while float(x) > 0.5:
            x = step(x)

    assert_budget(train, jnp.float32(1.0), compiles=1)


def test_collectives_have_a_budget_of_bytes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    total = jax.jit(lambda x: x.sum(), in_shardings=rows)
    values = jax.ShapeDtypeStruct((64,), "float32")
    assert_budget(total, values, collectives_bytes=100)
    text = failure(assert_budget, total, values, collectives_bytes=0)
    assert "sends" in text and "from each device, but the budget is 0 bytes" in text
    assert line("total = jax.jit(lambda x: x.sum(), in_shardings=rows)") in text


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({}, "assert_budget needs a budget"),
        ({"flops": "many"}, "'many' is not a number of FLOPs such as 3 GFLOP, 500M or 2e9"),
        ({"peak_bytes": "3 apples"}, "'3 apples' is not a number of bytes"),
        ({"equations": "3"}, "'3' is not a budget of equations"),
        ({"equations": -1}, "-1 is not a budget of equations"),
        ({"flops": float("nan")}, "nan is not a budget of flops"),
        ({"compiles": 1}, "compiles calls the function, so its arguments must be values"),
    ],
)
def test_an_invalid_budget_is_an_error_not_a_failure(budgets, message):
    with pytest.raises(ArgumentsError, match=re.escape(message)):
        assert_budget(loss, W, X, **budgets)


def test_a_program_cannot_have_a_budget_of_compilations():
    with pytest.raises(ArgumentsError, match="compiles needs a function to call"):
        assert_budget(jaxprtool.trace(loss, W, X), compiles=1)


def test_a_budget_needs_concrete_sizes():
    (n,) = jax.export.symbolic_shape("n")
    program = jaxprtool.trace(jnp.sin, jax.ShapeDtypeStruct((n,), "float32"))
    assert_budget(program, equations=1)
    with pytest.raises(ArgumentsError, match="a budget of flops needs sizes that are numbers"):
        assert_budget(jaxprtool.trace(lambda x: x * x, *program.in_avals), flops=1)


def test_an_invalid_function_is_an_error_not_a_failure():
    with pytest.raises(ArgumentsError, match="not an object of type int"):
        assert_budget(3, flops=1)
    with pytest.raises(ArgumentsError, match="loss is a program: it takes no arguments"):
        assert_budget(jaxprtool.trace(loss, W, X), W, flops=1)
    with pytest.raises(UserFunctionError, match="raised ZeroDivisionError"):
        assert_budget(lambda x: x / (1 // 0), 1.0, flops=1)


# --- --- forbidden contents -----------------------------------------------------------------------


def test_a_primitive_is_found_in_bodies():
    assert_no(loss, "gather", W, X)
    text = failure(assert_no, loss, "sort", W, X)
    assert text.splitlines()[0] == "loss has 1 sort equation:"
    assert text.splitlines()[1].endswith(f"{line('# three of them')}: sort")


def test_a_dtype_is_found_in_arguments_constants_and_results_of_equations():
    table = np.arange(3, dtype=np.float16)

    def mixed(x):
        half = x.astype(jnp.bfloat16) * 2  # narrower
        return half + table.sum()

    assert_no(mixed, "f64", 1.0)
    text = failure(assert_no, mixed, jnp.bfloat16, 1.0)
    assert "values of dtype bf16" in text and f"{line('# narrower')}: convert_elem" in text
    assert failure(assert_no, mixed, "bfloat16", 1.0) == text
    assert "x: f32[]" in failure(assert_no, lambda x: x + 1, np.float32, jnp.float32(1))
    constant = jaxprtool.trace(lambda x: x + jnp.asarray(table), jnp.float32(1))
    assert "f16[3]" in failure(assert_no, constant, "f16")


def test_an_unknown_primitive_is_an_error_not_a_success():
    with pytest.raises(ArgumentsError, match="no primitive or dtype 'srot'") as found:
        assert_no(loss, "srot", W, X)
    assert found.value.__notes__ == [f"hint: {found.value.hint}"]
    with pytest.raises(ArgumentsError, match="expected a primitive or a dtype"):
        assert_no(loss, object(), W, X)


# --- equivalence ----------------------------------------------------------------------------------


def test_programs_that_differ_in_names_and_order_are_equivalent():
    def one(a, b):
        left, right = jnp.sin(a), jnp.cos(b)
        return left + right

    def two(p, q):
        right, left = jnp.cos(q), jnp.sin(p)
        return left + right

    assert_equivalent(one, two, 1.0, 2.0)
    assert_equivalent(jaxprtool.trace(one, 1.0, 2.0), two, 1.0, 2.0)


def test_different_programs_fail_with_the_differences():
    text = failure(assert_equivalent, loss, lambda w, x: jnp.exp(loss(w, x)), W, X)  # more
    assert "different: 1 added" in text and "= exp " in text
    assert line("# more") in text


# --- donation -------------------------------------------------------------------------------------


def test_donated_arguments_that_are_reused_pass():
    step = jax.jit(lambda state, x: state + x.sum(), donate_argnums=0)
    assert_donated(step, W, X)
    assert_donated(jaxprtool.trace(step, W, X))


def test_unusable_donated_arguments_are_named_with_the_reason():
    def step(state, x):
        return {"w": state["w"].astype(jnp.bfloat16)}, x.sum()

    donating = jax.jit(step, donate_argnames=("state", "x"))
    text = failure(assert_donated, donating, {"w": W}, X)
    assert text.splitlines() == [
        "step cannot use 2 donated arguments:",
        "  state['w'], f32[64,64]: no result has this type; result[0]['w'] is bf16[64,64]",
        "  x, f32[8,64]: no result has this type",
    ]


def test_a_function_that_donates_nothing_fails():
    assert failure(assert_donated, jax.jit(loss), W, X).startswith("loss donates no argument")
