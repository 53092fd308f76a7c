"""Names of variables that unzip chooses: from arguments, the user's source, and scopes."""

from __future__ import annotations

import importlib.util
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxprtool import nest, unzip, variable
from jaxprtool.passes.unzip.auto import _distinct

KEY = jax.random.key(0)
X = jnp.ones((2, 4))


def draw(key, *shape):
    return jax.random.normal(key, shape)


def names(fun, *args, **options):
    """Return the paths of the variables of a function, in order."""
    options = options or {"auto": True}
    init, _ = unzip(fun, **options)(*args)
    return sorted(name.partition("variables")[2] for name in init.out_names)


def paths(*keys):
    return sorted("".join(f"[{part!r}]" for part in key.split("/")) for key in keys)


# --- the source ---------------------------------------------------------------------------------


class Layer:
    def __init__(self, key):
        self.kernel = draw(key, 4, 4)


def make(key):
    return draw(key, 4, 4)


def make_two(key):
    first, second = jax.random.split(key)
    u = make(first)
    return u, draw(second, 4)


def variable_in_scope(key, x):
    w = draw(key, 4, 4)
    return x @ w


def attribute(key, x):
    return x @ Layer(key).kernel


def entry(key, x):
    params = {}
    params["w"] = make(key)
    return x @ params["w"]


def display(key, x):
    params = {"w": 0.1 * make(key), "b": jnp.zeros(4)}
    return x @ params["w"] + params["b"]


def keyword(key, x):
    params = SimpleNamespace(w=make(key))
    return x @ params.w


def returned(key, x):
    w = make(key)
    return x @ w


def walrus(key, x):
    return x @ w if (w := make(key)) is not None else x


def unpacked(key, x):
    v, w = jax.random.normal(key, (2, 4))
    return x * v + jnp.sin(x * w)


def matched(key, x):
    first, second = jax.random.split(key)
    u, w = make(first), make(second)
    return x @ u + jnp.sin(x @ w)


def comprehended(key, x):
    weights = [make(sub) for sub in jax.random.split(key)]
    return x @ weights[0] + jnp.sin(x @ weights[1])


def in_place(key, x):
    noise = draw(key, 4)
    noise *= 3
    return x * noise


def product(key, x):
    y = x * draw(key, 4)
    return y


def laid_out(key, x):
    w = draw(key, 4, 4)
    y = x @ w.T.reshape(4, 4)
    return y


@jax.jit
def jitted(w, x):
    return x @ w


def passed_on(key, x):
    return jitted(draw(key, 4, 4), x)


@jax.jit
def jitted_maker(key):
    u, v = make_two(key)
    return v, {"deep": u}


def made_by_a_call(key, x):
    params = jitted_maker(key)
    return x @ params[1]["deep"] + params[0]


@jax.jit
def jitted_pair(key):
    return jax.random.normal(key, (4,)), jax.random.uniform(key, (4,))


def pair_of_a_call(key, x):
    a, b = jitted_pair(key)
    return x * a + jnp.sin(x * b)


def behind_a_barrier(key, x):
    first, second = jax.random.split(key)
    both = jax.lax.optimization_barrier((make(first), draw(second, 4)))
    return x @ both[0] + both[1]


def unpacked_behind_a_barrier(key, x):
    first, second = jax.random.split(key)
    u, w = jax.lax.optimization_barrier((make(first), draw(second, 4)))
    return x @ u + w


def kept_apart(key, x):
    first, second = jax.random.split(key)
    u, w = make(first), draw(second, 4)
    h, u, w = jax.lax.optimization_barrier((x, u, w))
    return h @ u + w


def parts(key, x):
    u, w = jnp.split(draw(key, 4, 4), 2)
    return x @ w.T + jnp.sin(x @ u.T)


def scanned(key, x):
    def init(_, key):
        w = draw(key, 4, 4)
        return None, w

    _, ws = jax.lax.scan(init, None, jax.random.split(key, 3))
    return jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0]


def last_carry(key, x):
    end, _ = jax.lax.scan(lambda h, _: (jnp.sin(h), None), draw(key, 4), None, length=3)
    return x * end


def rows_of_a_scan(key, x):
    start = draw(key, 4)
    _, sums = jax.lax.scan(lambda h, _: (jnp.sin(h), h.sum()), start, None, length=3)
    return sums * x.sum()


def by_checkpoint_name(key, x):
    return x @ checkpoint_name(make(key), "weights")


def by_sown_name(key, x):
    return x @ variable(make(key), name="weights")


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (variable_in_scope, ["w"]),
        (attribute, ["kernel"]),
        (entry, ["w"]),
        (display, ["w"]),
        (keyword, ["w"]),
        (returned, ["w"]),
        (walrus, ["w"]),
        (unpacked, ["v", "w"]),
        (matched, ["u", "w"]),
        (comprehended, ["weights", "weights_1"]),
        (in_place, ["noise"]),
        (product, ["normal"]),
        (laid_out, ["w"]),
        (passed_on, ["w"]),
        (made_by_a_call, ["u", "params"]),
        (pair_of_a_call, ["a", "b"]),
        (behind_a_barrier, ["both", "both_1"]),
        (unpacked_behind_a_barrier, ["u", "w"]),
        (kept_apart, ["u", "w"]),
        (parts, ["u", "w"]),
        (scanned, ["w"]),
        (last_carry, ["end"]),
        (rows_of_a_scan, ["sums"]),
        (by_checkpoint_name, ["weights"]),
        (by_sown_name, ["weights"]),
    ],
)
def test_a_variable_has_its_name_in_the_source(fun, expected):
    assert names(fun, KEY, X) == paths(*expected)


# --- libraries ----------------------------------------------------------------------------------

LIBRARY = """
import jax

class Linear:
    def __init__(self, key, rows, columns):
        self.weight = initial(key, (rows, columns))

def initial(key, shape):
    value = jax.random.normal(key, shape)
    return value

def get_parameter(name, key, shape):
    found = initial(key, shape)
    return found

class Dense:
    def __init__(self, key, rows, columns):
        kernel = get_parameter("kernel", key, (rows, columns))
        self.value = kernel
"""


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library.py").write_text(textwrap.dedent(LIBRARY))
    spec = importlib.util.spec_from_file_location("library", folder / "library.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_librarys_name_is_nested_in_the_users_name(library):
    def fun(key, x):
        model = library.Linear(key, 4, 3)
        return x @ model.weight

    assert names(fun, KEY, X) == paths("model/value")


def test_a_name_passed_as_a_string_takes_precedence(library):
    def fun(key, x):
        model = library.Dense(key, 4, 3)
        return x @ model.value

    assert names(fun, KEY, X) == paths("kernel")


def test_a_users_string_names_variables_of_a_library(library):
    def fun(key, x):
        return x @ library.get_parameter("mine", key, (4, 3))

    assert names(fun, KEY, X) == paths("mine")


def test_a_string_outside_of_a_users_name_does_not_count(library):
    def model(kind, key, x):
        w = library.initial(key, (4, 3))
        return x @ w

    def fun(key, x):
        return model("mlp", key, x)

    assert names(fun, KEY, X) == paths("w/value")


# --- scopes and arguments -----------------------------------------------------------------------


def test_named_scopes_are_scopes():
    def fun(key, x):
        for scope, sub in zip(("encoder", "decoder"), jax.random.split(key), strict=True):
            with jax.named_scope(scope), jax.named_scope("dense"):
                w = draw(sub, 4, 4)
                x = x @ w
        return x

    assert names(fun, KEY, X) == paths("encoder/dense/w", "decoder/dense/w")


def test_scopes_around_transformations_are_scopes():
    def fun(key, x):
        def loss(x):
            with jax.named_scope("net"):
                w = draw(key, 4, 4)
                return jnp.sin(x @ w).sum()

        return jax.grad(loss)(x)

    assert names(fun, KEY, X) == paths("net/w")


def test_nested_calls_keep_their_scope():
    def layer(key, x):
        w = draw(key, 4, 4)
        return x @ w

    def fun(key, x):
        first, second, third = jax.random.split(key, 3)
        x = nest(layer, scope="a")(first, x)
        x = nest(layer, scope="w")(second, x)
        return layer(third, x)

    assert names(fun, KEY, X) == paths("a/w", "w/w", "w_1")


def test_arguments_have_their_paths():
    def fun(params, x):
        return x @ params["layers"][0] + params["b"], x

    params = {"layers": [jnp.ones((4, 4))], "b": jnp.ones(4)}
    assert names(fun, params, X, known=0) == paths("params/layers/0", "params/b")


def test_a_key_has_the_name_of_the_argument():
    assert names(lambda rng, x: (rng, x), KEY, X) == paths("rng")


def test_variables_have_unique_names():
    given = [("w",), ("w",), ("w_1",), ("w",), ("a", "w"), ("a",), ("a", "w"), ("a_1", "b")]
    distinct = list(_distinct(given))
    assert distinct == [
        ("w",),
        ("w_2",),
        ("w_1",),
        ("w_3",),
        ("a", "w"),
        ("a_2",),
        ("a", "w_1"),
        ("a_1", "b"),
    ]
    assert not {path[:1] for path in distinct if len(path) > 1} & set(distinct)


def test_functions_without_a_source_file_have_names_too():
    scope: dict = {"jax": jax}
    exec("def fun(key, x):\n    w = jax.random.normal(key, (4, 3))\n    return x @ w\n", scope)
    assert names(scope["fun"], KEY, X) == paths("normal")
