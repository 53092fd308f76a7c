"""unzip with auto finds keys by type, anywhere in the arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxprtool
from jaxprtool.passes.unzip import Unzip, UnzipError
from tests.share import first_and_proofs

KEY, OTHER = jax.random.key(0), jax.random.key(1)
WORDS = jax.random.key_data(KEY)
X = jnp.arange(3.0)


def noise(key):
    return jax.random.normal(key, (3,))


def in_a_state(state, x):
    return state["w"] * x + noise(state["rng"])


def by_keyword(x, *, key, scale):
    return scale * x + noise(key)


def after_data(x, keys):
    return x + noise(keys["dropout"]) * noise(keys["params"])


def in_a_loop(x, key):
    def body(carry, x):
        key, total = carry
        key, now = jax.random.split(key)
        return (key, total + x * noise(now)), None

    return lax.scan(body, (key, jnp.zeros(3)), x)[0][1]


def in_a_branch(x, key):
    return lax.cond(x[0] > 1, lambda k: noise(k), lambda k: -noise(k), key) + x


def in_a_while(x, key):
    def body(carry):
        i, key, x = carry
        return i + 1, key, x + noise(jax.random.fold_in(key, i))

    return lax.while_loop(lambda c: c[0] < 2, body, (0, key, x))[2]


def over_keys(x, keys):
    return jax.vmap(noise)(keys).sum(0) + x


def one_of(x, keys):
    return jax.jit(lambda keys: noise(keys[1]))(keys) + x


@pytest.mark.parametrize("words", [False, True], ids=["typed", "words"])
@pytest.mark.parametrize(
    ("fun", "args", "kwargs", "init_names", "other_names"),
    first_and_proofs(
        [
            (in_a_state, ({"rng": KEY, "w": X}, X), {}, ("state['rng']",), ("state['w']", "x")),
            (by_keyword, (X,), {"key": KEY, "scale": 2.0}, ("key",), ("x", "scale")),
            (
                after_data,
                (X, {"dropout": KEY, "params": OTHER}),
                {},
                ("keys['dropout']", "keys['params']"),
                ("x",),
            ),
            (in_a_loop, (X, KEY), {}, ("key",), ("x",)),
            (in_a_branch, (X, KEY), {}, ("key",), ("x",)),
            (in_a_while, (X, KEY), {}, ("key",), ("x",)),
            (over_keys, (X, jax.random.split(KEY, 2)), {}, ("keys",), ("x",)),
            (one_of, (X, jax.random.split(KEY, 2)), {}, ("keys",), ("x",)),
        ]
    ),
)
def test_keys_are_found_by_type_anywhere(fun, args, kwargs, init_names, other_names, words):
    def is_key(leaf):
        return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    if words:
        args, kwargs = jax.tree.map(
            lambda x: jax.random.key_data(x) if hasattr(x, "dtype") and is_key(x) else x,
            (args, kwargs),
        )
    program = jaxprtool.trace(fun, *args, **kwargs)
    unzipped = Unzip(auto=True)(program)
    init, apply = unzipped["init"], unzipped["apply"]
    assert init.arg_names == init_names and apply.arg_names[-len(other_names) :] == other_names
    flat = dict(zip(program.arg_names, jax.tree.leaves((args, kwargs)), strict=True))
    given = jax.tree.unflatten(init.in_tree, [flat[name] for name in init.arg_names])
    variables = jax.tree.leaves(init(*given[0], **given[1]))
    leaves = [*variables, *(flat[name] for name in other_names)]
    given = jax.tree.unflatten(apply.in_tree, leaves)
    np.testing.assert_allclose(apply(*given[0], **given[1]), fun(*args, **kwargs), rtol=1e-6)


def test_a_key_in_an_argument_is_passed_to_init_only():
    state = {"rng": KEY, "w": X}
    init, apply = jaxprtool.unzip(in_a_state, auto=True)(state, X)
    variables = init(KEY)
    given = apply(variables, {"rng": None, "w": X}, X)
    np.testing.assert_allclose(given, in_a_state(state, X), rtol=1e-6)


def test_a_keyword_key_stays_a_keyword():
    init, apply = jaxprtool.unzip(by_keyword, auto=True)(X, key=KEY, scale=2.0)
    np.testing.assert_allclose(
        apply(init(key=KEY), X, scale=2.0), by_keyword(X, key=KEY, scale=2.0), rtol=1e-6
    )


def test_raw_keys_are_distinguished_from_data_of_the_same_type():
    def fun(data, key, words):
        return data + noise(key)[:2].astype(jnp.uint32) + words

    program = jaxprtool.trace(fun, WORDS, WORDS, WORDS)
    assert Unzip(auto=True)(program)["init"].arg_names == ("key",)


@pytest.mark.parametrize("split", [jnp.unstack, lambda keys: lax.split(keys, (1, 1))])
def test_raw_keys_are_found_after_their_array_is_split(split):
    def fun(x, keys):
        first, second = split(keys)
        return x + noise(first.reshape(2)) * noise(second.reshape(2))

    init, apply = jaxprtool.unzip(fun, auto=True)(X, jnp.stack([WORDS, WORDS]))
    assert init.arg_names == ("keys",) and "keys" not in apply.arg_names


def test_raw_keys_are_found_through_identity_operations():
    def fun(first, second, x):
        first, x, second = lax.optimization_barrier((first, x, second))
        return x + noise(checkpoint_name(second, "key"))

    assert Unzip(auto=True)(jaxprtool.trace(fun, WORDS, WORDS, X))["init"].arg_names == ("second",)


def test_a_seed_is_a_key_only_if_there_are_no_keys():
    def fun(seed, x):
        return noise(jax.random.key(seed)) * x

    assert Unzip(auto=True)(jaxprtool.trace(fun, 3, X))["init"].arg_names == ("seed",)
    both = jaxprtool.trace(lambda seed, x, key: fun(seed, x) + noise(key), 3, X, KEY)
    assert Unzip(auto=True)(both)["init"].arg_names == ("key",)


def test_key_args_choose_among_keys():
    program = jaxprtool.trace(lambda a, b: noise(a) * noise(b), KEY, OTHER)
    assert Unzip(auto=True)(program)["init"].arg_names == ("a", "b")
    assert Unzip(auto=True, key_args=1)(program)["init"].arg_names == ("b",)
    assert program.apply("unzip(auto=True, key_args=0)")["init"].arg_names == ("a",)


def test_a_function_without_a_key_is_an_error():
    program = jaxprtool.trace(lambda x, i: x[i], X, 1)
    with pytest.raises(UnzipError, match=r"lambda has no key among its arguments: none ") as caught:
        program.apply("unzip(auto=True)")
    assert "known" in caught.value.hint
    with pytest.raises(jaxprtool.errors.ArgumentsError, match="not 'typed'"):
        Unzip(key_args="typed")(program)


def test_static_arguments_do_not_count():
    def fun(mode, x, key):
        return x + noise(key) if mode == "train" else x

    init, apply = jaxprtool.unzip(fun, auto=True)(jaxprtool.static("train"), X, KEY)
    np.testing.assert_allclose(apply(init(KEY), X), fun("train", X, KEY), rtol=1e-6)
    init, apply = jaxprtool.unzip(fun, auto=True)("train", X, KEY)
    np.testing.assert_allclose(apply(init(KEY), "train", X), fun("train", X, KEY), rtol=1e-6)
