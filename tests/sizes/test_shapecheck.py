"""shapecheck: the types of results, claimed for all sizes of the arguments."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool.errors import ArgumentsError, CheckError, UserFunctionError

WEIGHTS = jnp.ones((8, 16))


def doubled(x):
    hidden = jnp.tanh(x * 2)
    return jnp.concatenate([hidden, hidden], axis=1) + 1


def dense(x):
    @jax.jit
    def layer(y):
        return jax.nn.relu(y @ WEIGHTS)

    return layer(x) + 1


def looped(xs):
    return lax.scan(lambda c, x: (c + x, jnp.outer(x, c)), xs[0] * 0, xs)


def branching(x):
    return lax.cond(x.sum() > 0, lambda: x.T * 2, lambda: x.T)


def pair(x, y):
    return {"sum": x + y.sum(), "signs": x > 0}


def test_a_claim_that_holds_returns_the_function():
    for fun, types, results in (
        (doubled, "f32[n,d]", "f32[n,2*d]"),
        (doubled, ["f32[n,d]"], "f32[n,d + d]"),
        (dense, "f32[n,8]", "f32[n,16]"),
        (looped, "f32[n,d]", "f32[d], f32[n,d,d]"),
        (looped, "f32[n,d]", ("f32[d]", "f32[n,d,d]")),
        (pair, "f32[n], i32[m]", {"sum": "f32[n]", "signs": "bool[n]"}),
        (pair, [jnp.ones(3), "f32[m]"], "{'sum': f32[3], 'signs': bool[3]}"),
        (jnp.ravel, "f32[n,m]", "f32[n*m]"),
        (jax.nn.softmax, "f32[n], axis=static(0)", "f32[n]"),
    ):
        assert jaxprtool.shapecheck(types, results)(fun) is fun


@pytest.mark.parametrize(
    ("fun", "types", "results", "message"),
    [
        (
            doubled,
            "f32[n,d]",
            "f32[n,d]",
            r"doubled is f32\[n,2\*d\], not f32\[n,d\]: caused by concatenate at .*check.py:\d+",
        ),
        (
            dense,
            "f32[n,8]",
            "f32[n,8]",
            r"is f32\[n,16\], not .*: caused by dot_general at .*check.py:\d+",
        ),
        (
            looped,
            "f32[n,d]",
            "f32[d], f32[n,d]",
            r"result\[1\] of looped is .*: caused by scan at .*check.py:\d+",
        ),
        (
            branching,
            "f32[n,d]",
            "f32[n,d]",
            r"is f32\[d,n\].*: caused by transpose at .*check.py:\d+",
        ),
        (
            pair,
            "f32[n], f32[n]",
            {"sum": "f32[n]", "signs": "f32[n]"},
            r"\['signs'\].*: caused by gt at",
        ),
        (lambda x: x, "f32[n,d]", "f32[d,n]", "not .*: it has the type of the argument x"),
        (lambda x: jnp.sort(-x, 0), "f32[n,d]", "f32[d,n]", "it has the type of the argument x"),
        (lambda x, w: x @ w, "f32[n,d], f32[d,d]", "f32[d,n]", "caused by dot_general at .*"),
        (lambda x: x.T, "f32[3,3]", "f32[3]", "caused by transpose at .*"),
        (
            lambda x: jax.jit(lambda y: y.astype("bfloat16"))(x) * 2,
            "f32[n]",
            "f32[n]",
            r"bf16\[n\], not f32\[n\]: caused by convert_element_type at",
        ),
        (lambda x: jax.jit(lambda y: y)(x), "f32[n]", "f32[1]", "the argument x"),
        (lambda x: 3.0, "f32[n]", "f32[n]", "it is a constant"),
    ],
)
def test_the_equation_that_violates_a_claim_is_named(fun, types, results, message):
    with pytest.raises(CheckError, match=message) as caught:
        jaxprtool.shapecheck(types, results)(fun)
    assert caught.value.exit_code == 1


def test_other_wrong_results_are_counted():
    for claim, more in (
        ("f32[n], f32[n]", "1 more result has a different type"),
        ("f32[n], f32[n], f32[n]", "2 more results have a different type"),
    ):
        count = claim.count("f32")
        with pytest.raises(CheckError) as caught:
            jaxprtool.shapecheck("f32[n,2]", f"({claim},)")(lambda x, count=count: (x,) * count)
        assert caught.value.hint == more


@pytest.mark.parametrize("types", [None, 5])
def test_claims_are_a_text_of_types_or_a_sequence(types):
    with pytest.raises(
        ArgumentsError, match=f"types of arguments must be a string, .*, not {types}"
    ):
        jaxprtool.shapecheck(types, "f32[n]")(jnp.sin)


def test_the_line_is_that_of_the_equation():
    line = doubled.__code__.co_firstlineno + 2
    with pytest.raises(CheckError, match=rf"caused by concatenate at .*test_shapecheck.py:{line}"):
        jaxprtool.shapecheck("f32[n,d]", "f32[n,d]")(doubled)


@pytest.mark.parametrize(
    ("fun", "types", "results"),
    [
        (doubled, "f32[n,d]", "f32[n,_]"),
        (doubled, "f32[n,d]", "f32[_,_]"),
        (doubled, "f32[_,3]", "f32[_,6]"),
        (looped, "f32[_,d]", ("f32[d]", "f32[_,d,_]")),
        (jnp.outer, "f32[_], f32[_]", "f32[_,_]"),
        (jnp.outer, ["f32[_]", "f32[3]"], "f32[_,3]"),
    ],
)
def test_a_placeholder_is_any_size(fun, types, results):
    assert jaxprtool.shapecheck(types, results)(fun) is fun


@pytest.mark.parametrize(
    ("fun", "types", "results", "message"),
    [
        (
            doubled,
            "f32[n,d]",
            "f32[_,d]",
            r"is f32\[n,2\*d\], not f32\[_,d\]: caused by concatenate",
        ),
        (doubled, "f32[n,d]", "f32[_]", r"not f32\[_\]"),
        (doubled, "f32[n,d]", "bf16[_,_]", r"not bf16\[_,_\]"),
        (lambda x, y: (x, y), "f32[_], f32[n]", "f32[n], f32[n]", r"is f32\[_1\], not f32\[n\]"),
    ],
)
def test_a_placeholder_is_a_size_and_no_other_symbol(fun, types, results, message):
    with pytest.raises(CheckError, match=message):
        jaxprtool.shapecheck(types, results)(fun)


def test_a_symbol_without_an_argument_is_not_a_placeholder():
    (other,) = jax.export.symbolic_shape("k")
    with pytest.raises(CheckError, match=r"is f32\[n\], not f32\[k\]"):
        jaxprtool.shapecheck("f32[n]", jax.ShapeDtypeStruct((other,), "float32"))(jnp.sin)


def test_placeholders_of_arguments_may_differ():
    with pytest.raises(UserFunctionError, match=r"\(_1,\).*\(_2,\)"):
        jaxprtool.shapecheck("f32[_], f32[_]", "f32[_]")(lambda x, y: x + y)


def test_results_of_another_structure_are_named():
    with pytest.raises(
        CheckError, match=r"pair does not return result\['total'\]; it returns result\['s"
    ):
        jaxprtool.shapecheck("f32[n], f32[n]", "{'total': f32[n], 'signs': f32[n]}")(pair)
    with pytest.raises(CheckError, match=r"pair also returns result\['signs'\]"):
        jaxprtool.shapecheck("f32[n], f32[n]", "{'sum': f32[n]}")(pair)
    with pytest.raises(CheckError, match=r"PyTreeDef\(\(\*, \*\)\), not PyTreeDef\(\[\*, \*\]\)"):
        jaxprtool.shapecheck("f32[n,d]", ["f32[d]", "f32[n,d,d]"])(looped)


@pytest.mark.parametrize(
    ("types", "results", "message"),
    [
        ("f32[n]", "f32[k]", "no argument has the symbol 'k'"),
        ("f32[n", "f32[n]", "not closed"),
        ("f32[n]", "f32[n", "claimed results is not closed"),
        ("f32[n]", "y=f32[n]", "the claimed results must be types without names"),
        ("f32[n]", "f32[2*_]", "no argument has the symbol '_'"),
        ("f32[2*_]", "f32[_]", "'_' is not a valid symbol name"),
        ("f32[n], f32[n]", "f32[n]", "too many positional arguments"),
    ],
)
def test_an_invalid_claim_is_refused(types, results, message):
    with pytest.raises(ArgumentsError, match=message):
        jaxprtool.shapecheck(types, results)(jnp.sin)


@pytest.mark.parametrize(
    ("written", "types"),
    [
        ("(m, n)", "f32[m,n]"),
        ("m n", "f32[m,n]"),
        ("m,n", "f32[m,n]"),
        ("[m, 3]", "f32[m,3]"),
        ("(m, m * n)", "f32[m,m*n]"),
        ("2*m n", "f32[2*m,n]"),
        ("(2*m,)", "f32[2*m]"),
        ("_", "f32[_]"),
        ("...", "f32[m,n]"),
    ],
)
def test_shapes_without_dtypes_get_a_hint(written, types):
    hint = f"write types as a jaxpr prints them: {types}"
    for call in (
        lambda: jaxprtool.shapecheck([written], "f32[]")(jnp.sin),
        lambda: jaxprtool.shapecheck(written, "f32[]")(jnp.sin),
        lambda: jaxprtool.shapecheck("f32[m,n]", written)(jnp.sin),
        lambda: jaxprtool.mask(jnp.sin, [written], written)([jnp.ones((2, 2))], {"m": 1}),
        lambda: jaxprtool.jit(jnp.sin, shapes={"m": (4,)}, types={"x": written})(jnp.ones(3)),
    ):
        with pytest.raises(ArgumentsError) as error:
            call()
        assert error.value.hint == hint


def test_a_number_is_no_type_of_a_result():
    with pytest.raises(ArgumentsError, match="1 is not a type of a result: write types as"):
        jaxprtool.shapecheck("f32[n]", "1")(jnp.sin)


def test_a_function_that_cannot_be_traced_for_all_sizes_raises_jaxs_error():
    with pytest.raises(UserFunctionError, match=r"same shape, got \(d,\) and \(8,\)"):
        jaxprtool.shapecheck("f32[n,d]", "f32[n,16]")(dense)


def test_shapecheck_is_a_decorator():
    @jaxprtool.shapecheck("f32[n,m], f32[m]", "f32[n]")
    def matvec(a, b):
        return a @ b

    assert matvec(jnp.ones((2, 3)), jnp.ones(3)).shape == (2,)
