"""Programs are compared up to the names of variables, and a difference is found and described."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equivalence import equivalent, structural_difference
from tests.programs import harness_programs, sample_programs
from tests.programs.samples import sample_files
from tests.share import first_and_proofs

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def loop(x, factor=2.0, reverse=False):
    def body(carry, row):
        return lax.cond(carry.sum() > 0, lambda c: c * factor, jnp.sin, carry) + row, carry

    return lax.scan(body, x, jnp.ones((3, 4)), reverse=reverse)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), x), lambda x, ct: (2 * ct + 0 * x,))


@jax.custom_vjp
def wrongly_doubled(x):
    return 2 * x


wrongly_doubled.defvjp(lambda x: (wrongly_doubled(x), x), lambda x, ct: (3 * ct + 0 * x,))


def traced(fun, *args, **options):
    return jaxprtool.trace(fun, *args or (X,), **options)


def sown(tree=tuple, **options):
    return lambda x: list(jaxprtool.sow(tree([x, x]), **{"tag": "t", "name": "n"} | options))


def scoped(scope):
    return lambda x: jaxprtool.nest(jnp.sin, scope=scope)(x)


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_every_sample_is_equivalent_to_itself_traced_again(file):
    for case in sample_programs(file):
        first = case.program()
        jax.clear_caches()
        found = structural_difference(first, case.trace())
        # JAX 0.12 keeps custom_root's functions in an object that is compared by identity.
        opaque = any("_prim" in eqn.params for eqn in first.jaxpr.eqns)
        assert found is None or (opaque and "parameter _prim" in found), (case.name, found)


@pytest.mark.proof
def test_jaxs_own_programs_are_equivalent_to_themselves_traced_again():
    for case in harness_programs(40):
        assert structural_difference(case.program(), case.trace()) is None, case.name


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        (loop, lambda x: loop(x, reverse=True), r"\(scan\), parameter reverse: False against True"),
        (
            loop,
            lambda x: loop(x, 3.0),
            r"parameter branches, .*\(mul\), operands: the literal 2.0.* at 1",
        ),
        (jnp.sin, jnp.cos, r"equation 0 \(sin\): sin against cos"),
        (lambda x: x - 1.0, lambda x: 1.0 - x, "operands: a variable"),
        (lambda x: (x, x + 1), lambda x: (x + 1, x), "results: a variable"),
        (lambda x: (x, x), lambda x: [x, x], "out_tree"),
        (lambda x: x, lambda x: x + 1, "number of equations: 0 against 1"),
        (doubled, wrongly_doubled, r"parameter bwd, .*literal 2.0.* against the literal 3.0"),
        (
            lambda x: x * np.float32("nan"),
            lambda x: x * -np.float32("nan"),
            r"literal nan",
        ),
        (lambda x: x * 0.0, lambda x: x * -0.0, r"literal 0.0.* against the literal -0.0"),
        (lambda x: x + jnp.arange(4.0), lambda x: x + jnp.ones(4), "iota against broadcast_in_dim"),
        (
            lambda x: jnp.dot(x, x),
            lambda x: jnp.dot(x, x, precision="highest"),
            "parameter precision",
        ),
        (sown(name="v"), sown(name="w"), r"\(sow\), parameter name: v against w"),
        (sown(name=None), sown(name="w"), "parameter name: None against w"),
        (sown(mode="strict"), sown(mode="append"), "parameter mode"),
        (sown(tag="a"), sown(tag="b"), "parameter tag"),
        (sown(tree=list), sown(tree=tuple), "parameter tree"),
        (sown(), sown(key=2.0), "operands"),
        (scoped("a"), scoped("b"), "parameter name: nest:a against nest:b"),
    ],
)
def test_a_difference_is_found_and_described(p, q, message):
    found = structural_difference(traced(p), traced(q))
    assert found is not None and re.search(message, found), found
    assert not equivalent(traced(p), traced(q))


def test_weak_types_are_compared():
    weak, strong = traced(lambda x: x + 1, 2.0), traced(lambda x: x + 1, np.float32(2.0))
    assert re.search("^arguments: .*weak_type=True.* against", structural_difference(weak, strong))


def test_constants_are_compared_by_content():
    def with_constant(values):
        constant = np.array(values, np.float32)
        return traced(lambda x: x + constant)

    assert equivalent(with_constant([1, 2, 3, 4]), with_constant([1, 2, 3, 4]))
    assert not equivalent(with_constant([1, 2, 3, 4]), with_constant([1, 2, 3, 5]))


def test_keys_are_compared_by_implementation_and_data():
    def with_key(seed, impl=None):
        key = jax.random.key(seed, impl=impl)
        return traced(lambda x: x + jax.random.uniform(key, (4,)))

    assert equivalent(with_key(0), with_key(0))
    assert not equivalent(with_key(0), with_key(1))
    assert not equivalent(with_key(0), with_key(0, "rbg"))


def test_contexts_are_compared():
    def marked(x):
        with set_xla_metadata(note="here"):
            return jnp.sin(x)

    assert "context" in structural_difference(traced(jnp.sin), traced(marked))


def test_names_are_ignored():
    program = traced(loop)
    renamed = program.replace(name="other", arg_names=("z",))
    assert equivalent(program, renamed)


def test_symbols_of_two_scopes_are_compared_by_name():
    """So are those of a ref, whose shape is that of the type that it holds."""

    def traced(shape):
        x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
        return jaxprtool.trace(lambda x: jax.new_ref(x)[...], x)

    assert equivalent(traced("n"), traced("n"))
    assert not equivalent(traced("n"), traced("m"))
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
    assert not equivalent(traced("n"), jaxprtool.trace(lambda x: jnp.sin(x), x))


def test_two_variables_are_not_equal_to_one():
    twice = jax.make_jaxpr(lambda x, y: (x + y, x + y))(1.0, 2.0)
    body = jaxcompat.open_jaxpr(twice)
    first = body.eqns[0].outvars[0]
    merged = jaxcompat.replace_jaxpr(
        twice,
        constvars=(),
        consts=(),
        invars=body.invars,
        outvars=[first, first],
        eqns=body.eqns,
        debug_info=body.debug_info,
    )
    assert not equivalent(twice, merged) and not equivalent(merged, twice)


def test_a_program_under_named_axes_is_type_checked_under_them():
    from jaxprtool.ir.program import type_check

    program = traced(lambda x: lax.psum(x, "i"), axis_env=[("i", 4)])
    assert program.axis_env == (("i", 4),)
    type_check(program)
    other = traced(lambda x: lax.psum(x, "i"), axis_env=[("i", 8)])
    assert "axis_env" in structural_difference(program, other)


@jax.custom_jvp
def called_by_its_rule(x):
    return jnp.sin(x)


@called_by_its_rule.defjvp
def _called_by_its_rule_jvp(primals, tangents):
    return called_by_its_rule(primals[0]), jnp.cos(primals[0]) * tangents[0]


def test_a_rule_that_calls_its_own_function_is_compared_to_its_end():
    first, second = jax.custom_jvp(jnp.sin), jax.custom_jvp(jnp.sin)
    first.defjvp(lambda p, t: (second(p[0]), jnp.cos(p[0]) * t[0]))
    second.defjvp(lambda p, t: (second(p[0]), jnp.cos(p[0]) * t[0]))
    assert structural_difference(traced(called_by_its_rule), traced(first)) is None
    second.defjvp(lambda p, t: (second(p[0]), jnp.sin(p[0]) * t[0]))
    assert "parameter jaxpr" in structural_difference(traced(called_by_its_rule), traced(first))
