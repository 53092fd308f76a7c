"""How to define rewrites, and the errors of invalid ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError, PluginError, UserFunctionError
from jaxprtool.passes import Pass
from jaxprtool.passes.patterns import Rewrite, rewrite

X = jnp.arange(3.0)


def sine(x):
    """Write the sine by a cosine."""
    return jnp.sin(x) * 1.5


def cosine(x):
    return jnp.cos(x - np.pi / 2) * 1.5


def test_a_decorator_and_a_plain_call_make_the_same_rewrite():
    decorated = jaxprtool.rewrite(x="f32[n]")(sine)
    assert decorated.to(cosine) is cosine
    plain = jaxprtool.rewrite(sine, cosine, "f32[n]", name="other")
    program = jaxprtool.trace(sine, X)
    assert jaxprtool.equivalent(decorated(program), plain(program))
    assert isinstance(plain, Rewrite) and isinstance(plain, Pass)
    assert (decorated.name, plain.name) == ("sine", "other")
    assert decorated.__doc__ == sine.__doc__
    assert decorated != plain and len({decorated, plain}) == 2


def test_types_are_text_or_examples_and_may_be_trees():
    def dense(params, x, *, scale):
        return (x @ params["w"] + params["b"]) * scale

    def other(params, x, *, scale):
        return (params["b"] + x @ params["w"]) * scale

    made = rewrite(
        dense,
        other,
        {"w": jax.ShapeDtypeStruct((3, 4), "float32"), "b": jnp.zeros(4)},
        "f32[n,3]",
        scale=2.0,
    )
    program = jaxprtool.trace(
        lambda w, b, x: (x @ w + b) * 0.5, jnp.ones((5, 6)), jnp.ones(6), jnp.ones((2, 5))
    )
    (match,) = made.matches(program)
    assert list(match.types) == ["params['b']", "params['w']", "x", "scale"]
    assert match.sizes == {"n": 2} and match.values == {"scale": 0.5}


def test_a_replacement_may_have_other_argument_names():
    made = rewrite(x="f32[n]", y="f32[n]")(lambda x, y: jnp.sin(x) * y)
    made.to(lambda a, b: b * jnp.sin(a))
    program = jaxprtool.trace(lambda p, q: jnp.sin(p) * q, X, X)
    assert len(made.matches(program)) == 1


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("f32[n", "f32[n]"), "is not closed"),
        (("g32[n]", "f32[n]"), "'g32' is not a dtype"),
        (("f32[n/2]", "f32[n]"), "'n/2' is not a size"),
        (("f32[-1]", "f32[n]"), "'-1' is not a size"),
        (("f32[n], f32[n]", "f32[n]"), "which is not a single type"),
        (("f32", "f32[n]"), "is not allowed"),
        ((object(), "f32[n]"), "is declared by a object"),
        (("f32[n]",), "do not fit the pattern of rewrite 'add'"),
    ],
)
def test_invalid_types_are_reported(types, message):
    def add(x, y):
        return x + y

    with pytest.raises(ArgumentsError) as caught:
        rewrite(*types)(add)
    assert message in str(caught.value)


def printing(x):
    jax.debug.print("{}", x)
    return x + 1


NO_PATTERNS = {
    "has effects: debug_": (printing, ("f32[n]",)),
    "computes nothing": (lambda x: (x, 1.0), ("f32[n]",)),
    "does not use all its arguments: y": (lambda x, y: x + 1, ("f32[n]", "f32[n]")),
    "has parts": (lambda x, y: (jnp.sin(x), jnp.cos(y)), ("f32[n]", "f32[n]")),
    "has effects, or calls sow": (
        lambda x: jaxprtool.sow(x * 2, tag="t", name="n"),
        ("f32[n]",),
    ),
}


@pytest.mark.parametrize("message", NO_PATTERNS)
def test_invalid_patterns_are_reported(message):
    pattern, types = NO_PATTERNS[message]
    with pytest.raises(PluginError, match=message):
        rewrite(*types, name="none")(pattern)


def test_a_pattern_that_raises_at_its_own_types_is_reported():
    with pytest.raises(UserFunctionError, match="the pattern of rewrite 'lambda' raised") as caught:
        rewrite("f32[n]", "f32[m]")(lambda x, y: x + y)
    assert caught.value.hint == "it was traced with n=11, m=13; use other sizes with f32[8,64]"


def test_a_rewrite_without_a_replacement_is_reported():
    program = jaxprtool.trace(sine, X)
    with pytest.raises(PluginError, match="rewrite 'sine' has no replacement"):
        rewrite("f32[n]")(sine)(program)
    with pytest.raises(ArgumentsError, match="takes two functions"):
        rewrite(sine)


BAD_REPLACEMENTS = {
    "returns f32\\[\\], but the pattern returns f32\\[3\\]": lambda x: x.sum(),
    "returns f16\\[3\\], but the pattern returns f32\\[3\\]": lambda x: x.astype("float16"),
    "returns PyTreeDef\\(\\(\\*, \\*\\)\\), but the pattern returns PyTreeDef\\(\\*\\)": lambda x: (
        x,
        x,
    ),
    "has effects: debug_": printing,
}


@pytest.mark.parametrize("message", BAD_REPLACEMENTS)
def test_a_replacement_with_other_results_is_reported(message):
    made = rewrite(sine, BAD_REPLACEMENTS[message], "f32[n]")
    with pytest.raises(PluginError, match=f"the replacement of rewrite 'sine' {message}"):
        made(jaxprtool.trace(sine, X))


def test_a_replacement_or_a_check_that_raises_is_reported():
    def fails(_):
        raise ValueError("not\ntoday")

    program = jaxprtool.trace(sine, X)
    with pytest.raises(UserFunctionError, match="raised ValueError: not today for sine") as caught:
        rewrite(sine, fails, "f32[n]")(program)
    assert caught.value.hint and isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(PluginError, match="the check of rewrite 'sine' raised ValueError"):
        rewrite(sine, cosine, "f32[n]", check=fails)(program)
