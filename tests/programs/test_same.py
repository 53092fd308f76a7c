"""The check that programs are the same accepts equal ones and reports the difference of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxprtool.errors import CheckError
from jaxprtool.loading.trace import trace
from tests.programs import Case, prove, same
from tests.programs.recorder import record, recording
from tests.programs.same import Original, count_equations, lasting_effects
from tests.programs.values import first_value_difference, values_agree

X = jnp.array([0.5, -1.5, 2.0], jnp.float32)


def compare(before, after, *args, **options):
    return same(trace(before, *args), trace(after, *args), list(args), **options)


def debug(tag, x, ordered=True):
    jax.debug.callback(lambda v: record(tag, ordered, v), x, ordered=ordered)


def test_a_program_is_the_same_as_itself():
    verdict = compare(lambda x: jnp.sin(x) * 2, lambda x: jnp.sin(x) * 2, X)
    assert (verdict.stepwise, verdict.gradients) == (False, "reverse")


def test_dead_code_is_not_a_difference():
    compare(lambda x: (jnp.cos(x), jnp.sin(x))[1], jnp.sin, X)


def test_a_changed_value_is_found_and_located():
    with pytest.raises(AssertionError, match=r"value 0 .* at \[1\]"):
        compare(lambda x: x * 2, lambda x: x * jnp.array([2.0, 3.0, 2.0]), X)


def test_one_unit_in_the_last_place_is_a_difference():
    with pytest.raises(AssertionError, match="results, step by step"):
        compare(lambda x: x * 3, lambda x: x * np.nextafter(np.float32(3), np.float32(4)), X)


def test_one_unit_in_the_last_place_passes_where_a_pass_is_not_exact():
    after = lambda x: x * np.nextafter(np.float32(3), np.float32(4))  # noqa: E731
    compare(lambda x: x * 3, after, X, exact=False)
    with pytest.raises(AssertionError, match="results"):
        compare(lambda x: x * 3, lambda x: x * 3.001, X, exact=False)


def test_the_sign_of_a_zero_is_a_difference():
    with pytest.raises(AssertionError, match=r"before 0\.0, after -0\.0"):
        compare(lambda x: x * 0.0, lambda x: x * -0.0, jnp.ones(2), gradients=False)


def test_any_nan_is_equal_to_any_nan_and_to_nothing_else():
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    compare(lambda x: x * np.float32(np.nan), lambda x: x + payload, X[:1], gradients=False)
    with pytest.raises(AssertionError, match="before nan"):
        compare(lambda x: x * np.nan, lambda x: x * 1.0, X, gradients=False)


def test_a_complex_imaginary_part_is_compared():
    z = X + 1j
    with pytest.raises(AssertionError, match="value 0"):
        compare(lambda z: z * 2, lambda z: z * 2 + 1e-3j, z, gradients=False)


def test_keys_are_compared_by_their_data():
    key = jax.random.key(0)
    compare(jax.random.split, jax.random.split, key)
    with pytest.raises(AssertionError, match="value 0, key<fry>"):
        compare(jax.random.split, lambda key: jax.random.split(jax.random.fold_in(key, 1)), key)


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (lambda x: (x * 2).astype(jnp.bfloat16), "type of result 0: f32.* before, bf16"),
        (lambda x: (x * 2)[:2], "type of result 0"),
        (lambda x: [x * 2], "structure of the results"),
        (lambda x: (x * 2, x), "structure of the results"),
        (lambda y: y * 2, "argument names"),
    ],
)
def test_a_changed_declaration_is_found(after, what):
    with pytest.raises(AssertionError, match=what):
        compare(lambda x: x * 2, after, X)


def test_a_changed_weak_type_is_found():
    with pytest.raises(AssertionError, match="weakly typed before"):
        compare(lambda x: x * 2, lambda x: lax.convert_element_type(x, jnp.float32) * 2, 1.5)


def test_a_changed_result_name_is_found():
    program = trace(lambda x: {"a": x}, X)
    with pytest.raises(AssertionError, match="result names"):
        same(program, program.replace(out_names=("b",)), [X])


# --- effects ----------------------------------------------------------------------------------


def two(first, second, ordered=True):
    def function(x):
        debug(first, x, ordered)
        debug(second, x + 1, ordered)
        return x

    return function


@pytest.mark.parametrize("ordered", [True, False])
def test_a_dropped_callback_is_found(ordered):
    with pytest.raises(AssertionError, match="callbacks"):
        compare(two(1, 2, ordered), lambda x: (debug(1, x, ordered), x)[1], X)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_duplicated_callback_is_found(ordered):
    twice = lambda x: two(1, 2, ordered)(two(1, 2, ordered)(x))  # noqa: E731
    with pytest.raises(AssertionError, match="callbacks"):
        compare(two(1, 2, ordered), twice, X)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_changed_order_of_callbacks_is_found(ordered):
    def swapped(x):
        debug(2, x + 1, ordered)
        debug(1, x, ordered)
        return x

    with pytest.raises(AssertionError, match=r"callbacks.*\[?\(?1, 2.* before, .*2, 1"):
        compare(two(1, 2, ordered), swapped, X)


def test_values_received_by_callbacks_are_compared():
    with pytest.raises(AssertionError, match="what callback 1 saw"):
        compare(lambda x: (debug(1, x), x)[1], lambda x: (debug(1, x * 2), x)[1], X)


def test_losing_the_only_effect_is_found_by_the_declaration():
    with pytest.raises(AssertionError, match=r"effects: \['.*'\] before, \[\] after"):
        compare(lambda x: (debug(1, x), x)[1], lambda x: x, X)


def test_printed_text_is_compared():
    def printing(text):
        return lambda x: (jax.debug.print(text, x), x)[1]

    compare(printing("{}"), printing("{}"), X)
    with pytest.raises(AssertionError, match=r"effects|printed"):
        compare(printing("{}"), lambda x: x, X)


def test_a_callback_in_a_loop_counts_once_per_iteration():
    def loop(length):
        def body(c, _):
            debug(1, c)
            return c + 1, None

        return lambda x: (lax.scan(body, 0, None, length=length), x)[1]

    compare(loop(3), loop(3), X)
    with pytest.raises(AssertionError, match="ordered callbacks"):
        compare(loop(3), loop(2), X)


def test_a_lost_write_to_a_ref_is_found():
    def write(x, *values):
        ref = jax.new_ref(x)
        for value in values:
            ref[...] = ref[...] + value
        return ref[...]

    compare(lambda x: write(x, 1, 2), lambda x: write(x, 1, 2), X)
    with pytest.raises(AssertionError, match="value 0"):
        compare(lambda x: write(x, 1, 2), lambda x: write(x, 1), X)


def test_lasting_effects_are_counted_with_their_place():
    def function(x):
        debug(1, x)
        io_callback(lambda v: v, jax.ShapeDtypeStruct((3,), jnp.float32), x)
        return lax.cond(x[0] > 0, lambda: (debug(2, x), x)[1], lambda: x)

    found = lasting_effects(trace(function, X).jaxpr)
    assert found == {
        ("debug_callback",): 1,
        ("io_callback",): 1,
        ("cond", "debug_callback"): 1,
    }


def test_equations_are_counted_at_every_depth():
    double = jax.jit(lambda x: x * 2)
    assert count_equations(trace(lambda x: double(double(x)) + 1, X).jaxpr) == 5


# --- gradients --------------------------------------------------------------------------------


def with_rule(factor):
    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    @function.defjvp
    def rule(primals, tangents):
        return jnp.sin(primals[0]), factor * jnp.cos(primals[0]) * tangents[0]

    return lambda x: function(x)


def test_a_lost_forward_rule_is_found():
    compare(with_rule(2.0), with_rule(2.0), X)
    with pytest.raises(AssertionError, match="reverse gradients"):
        compare(with_rule(2.0), lambda x: jnp.sin(x), X)


def test_a_lost_reverse_rule_is_found():
    clipped = jax.custom_vjp(lambda x: x)
    clipped.defvjp(lambda x: (x, None), lambda _, g: (g * 0.5,))
    with pytest.raises(AssertionError, match="reverse gradients"):
        compare(lambda x: clipped(x), lambda x: x, X)


def test_a_loop_without_reverse_mode_is_compared_in_forward_mode():
    def loop(scale):
        def run(x):
            return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * scale), (0, x))[1]

        return run

    assert compare(loop(2.0), loop(2.0), X).gradients == "forward"
    forward = jax.custom_jvp(loop(2.0))
    forward.defjvp(lambda p, t: (loop(2.0)(*p), loop(3.0)(*t)))
    with pytest.raises(AssertionError, match="forward gradients"):
        compare(loop(2.0), lambda x: forward(x), X)


def test_a_program_that_lost_its_derivative_is_found():
    def opaque(x):
        return jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    with pytest.raises(AssertionError, match="gradients: lost"):
        compare(lambda x: x * 2, opaque, X)
    assert compare(opaque, opaque, X).gradients.startswith("not differentiable")


def chaotic(step):
    def run(x):
        for _ in range(30):
            x = step(x) * (1 - x)
        return x

    return run


def test_derivatives_may_differ_by_rounding_of_the_original():
    x = jnp.array([0.3, 0.4, 0.6])
    old, new = chaotic(lambda x: 3.9 * x), chaotic(lambda x: 3 * x + 0.9 * x)
    original = Original(trace(old, x), [x])
    values = [original.gradients.values, Original(trace(new, x), [x]).gradients.values]
    assert first_value_difference(*values, values_agree) is not None
    assert original.same_gradients(trace(new, x)) == "reverse"


def test_a_lost_rule_is_found_where_rounding_is_large():
    rule = jax.custom_jvp(lambda x: 3.9 * x)
    rule.defjvp(lambda p, t: (3.9 * p[0], 1.95 * t[0]))
    x = jnp.array([0.3, 0.4, 0.6])
    with pytest.raises(AssertionError, match="reverse gradients"):
        Original(trace(chaotic(rule), x), [x]).same_gradients(trace(chaotic(lambda x: 3.9 * x), x))


def test_integers_have_no_gradients_to_compare():
    assert compare(lambda i: i + 1, lambda i: i + 1, 3).gradients == "no inexact argument"


# --- compiled bodies --------------------------------------------------------------------------


def test_bits_that_differ_only_by_how_a_body_is_compiled_are_the_same():
    """XLA rounds a loop differently from its iterations, so they are compared stepwise."""

    def body(c, x):
        return c * x + 0.1, (c * c + x * 0.3, jnp.sin(c * x))

    def scanned(x, keep):
        return lax.scan(body, jnp.float32(0.3), x)[1][keep]

    def trimmed(x):
        return lax.scan(lambda c, x: (body(c, x)[0], body(c, x)[1][0]), jnp.float32(0.3), x)[1]

    x = jnp.linspace(0.1, 0.9, 64)
    compare(lambda x: scanned(x, 0), trimmed, x)
    with pytest.raises(AssertionError, match="results"):
        compare(lambda x: scanned(x, 1), trimmed, x)


# --- prove ----------------------------------------------------------------------------------------


def test_prove_has_no_verdict_if_nothing_was_rewritten():
    before, after, verdict = prove(Case("sine", jnp.sin, (X,)), lambda program: program)
    assert before is after
    assert verdict is None


def test_prove_type_checks_the_result():
    def break_it(program):
        other = trace(lambda x: (x, x), X)
        return program.replace(jaxpr=other.jaxpr)

    with pytest.raises(CheckError, match="the numbers of results differ"):
        prove(Case("sine", jnp.sin, (X,)), break_it)


def test_prove_runs_in_64_bits_if_the_case_needs_it():
    case = Case("wide", lambda x: x * 2, (np.float64(1.5),), x64=True)
    before, _, verdict = prove(case, lambda _: trace(lambda x: x + x, *case.args))
    assert str(before.out_avals[0].dtype) == "float64"
    assert verdict.gradients == "reverse"


def test_recordings_nest_and_close():
    with recording() as outer:
        record(1, True, 1.0)
        with recording() as inner:
            record(2, True, 2.0)
    record(3, True, 3.0)
    assert [e.tag for e in outer.events] == [1]
    assert [e.tag for e in inner.events] == [2]
