"""Reaping and planting, clause by clause: names, modes, lists, tags, scopes and calls."""

import inspect
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprtool_harvest import HarvestError, call_and_reap, harvest, plant, reap

from jaxprtool import nest, sow
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import equations
from jaxprtool.jaxcompat import open_jaxpr

value = partial(sow, tag="t")
reap_t, plant_t, harvest_t = (partial(f, tag="t") for f in (reap, plant, harvest))
call_and_reap_t = partial(call_and_reap, tag="t")


def primitives(fun, *args):
    return [e.primitive.name for e in equations(open_jaxpr(jax.make_jaxpr(fun)(*args)))]


def twice_sown(x):
    return value(x, name="x") + value(x + 1.0, name="y")


# --- what is given and taken --------------------------------------------------------------------


def test_reap_gives_what_is_sown_under_the_tag_by_name():
    assert reap_t(twice_sown)(1.0) == {"x": 1.0, "y": 2.0}
    assert call_and_reap_t(twice_sown)(1.0) == (3.0, {"x": 1.0, "y": 2.0})


def test_plant_uses_the_values_that_it_is_given_and_computes_the_others():
    assert plant_t(twice_sown)({}, 1.0) == 3.0
    assert plant_t(twice_sown)({"x": 5.0}, 1.0) == 7.0
    assert plant_t(twice_sown)({"x": 5.0, "y": 6.0}, 1.0) == 11.0


def test_harvest_plants_and_reaps_what_is_not_planted():
    assert harvest_t(twice_sown)({}, 1.0) == (3.0, {"x": 1.0, "y": 2.0})
    assert harvest_t(twice_sown)({"y": 7.0}, 1.0) == (8.0, {"x": 1.0})
    assert harvest_t(twice_sown)({"x": 7.0, "y": 7.0}, 1.0) == (14.0, {})


def test_a_value_that_nothing_uses_is_reaped():
    def f(x):
        value(x + 2.0, name="z")
        return x

    assert reap_t(f)(1.0) == {"z": 3.0}
    assert reap_t(jax.jit(f))(1.0) == {"z": 3.0}


def test_constants_are_reaped_and_planted():
    def f(x):
        return x + value(10.0, name="ten") + value(7, name="seven")

    assert reap_t(f)(1.0) == {"ten": 10.0, "seven": 7}
    assert plant_t(f)({"ten": 2.0, "seven": 15.0}, 1.0) == 18.0


def test_an_argument_or_a_constant_may_be_sown_and_returned_as_it_is():
    def f(x):
        return value(x, name="x"), value(3.0, name="c")

    assert call_and_reap_t(f)(1.0) == ((1.0, 3.0), {"x": 1.0, "c": 3.0})
    assert plant_t(f)({"x": 5.0}, 1.0) == (5.0, 3.0)


def test_values_are_pytrees():
    Pair = namedtuple("Pair", "a b")

    def f(x):
        pair = value(Pair(x, [2 * x, None]), name="pair")
        return pair.a + pair.b[0]

    assert reap_t(f)(1.0) == {"pair": Pair(1.0, [2.0, None])}
    assert plant_t(f)({"pair": Pair(5.0, [6.0, None])}, 1.0) == 11.0
    with pytest.raises(HarvestError, match=r"planted for 'pair' is PyTreeDef\(\*\), but the"):
        plant_t(f)({"pair": 1.0}, 1.0)


def test_keys_are_reaped_and_planted():
    def f(key):
        return jax.random.normal(value(key, name="key"))

    key, other = jax.random.key(0), jax.random.key(1)
    assert reap_t(f)(key)["key"] == key
    assert plant_t(f)({"key": other}, key) == f(other)
    with pytest.raises(HarvestError, match=r"'key' is f32\[\], but the sown value is key<fry>\[\]"):
        plant_t(f)({"key": 1.0}, key)


def test_the_key_that_a_value_is_sown_with_is_not_part_of_it():
    def f(key, x):
        return sow(x, tag="t", name="x", key=key)

    assert call_and_reap_t(f)(jax.random.key(0), 2.0) == (2.0, {"x": 2.0})
    assert plant_t(f)({"x": 3.0}, jax.random.key(0), 2.0) == 3.0


def test_keyword_arguments_reach_the_function_as_they_are():
    def f(x, *, negate):
        return value(-x if negate else x, name="x")

    assert reap_t(f)(1.0, negate=True) == {"x": -1.0}
    assert harvest_t(f)({"x": 3.0}, 1.0, negate=False) == (3.0, {})


def test_what_the_function_raises_is_raised():
    def f(x):
        raise KeyError("of mine")

    for wrapped in (reap_t(f), call_and_reap_t(f), partial(plant_t(f), {})):
        with pytest.raises(KeyError, match="of mine"):
            wrapped(1.0)


def test_reaped_functions_keep_their_signature_and_planted_ones_have_an_argument_more():
    def f(x, *, negate):
        """Doc."""

    assert inspect.signature(reap_t(f)) == inspect.signature(call_and_reap_t(f))
    assert list(inspect.signature(reap_t(f)).parameters) == ["x", "negate"]
    assert list(inspect.signature(plant_t(f)).parameters) == ["plants", "args", "kwargs"]
    assert plant_t(f).__name__ == "f" and plant_t(f).__doc__ == "Doc."


def test_the_tag_is_a_string():
    for make in (reap, plant, harvest, call_and_reap):
        with pytest.raises(TypeError, match="the tag of sown values must be a string, not None"):
            make(twice_sown, tag=None)(1.0)


def test_a_sown_value_needs_a_name():
    def f(x):
        return value(x, name=None)

    for wrapped in (reap_t(f), partial(plant_t(f), {})):
        with pytest.raises(HarvestError, match="Must provide name for sown value"):
            wrapped(1.0)
    assert call_and_reap(f, tag="other")(1.0) == (1.0, {})


# --- what fits a planted value -------------------------------------------------------------------


def test_planted_values_take_the_type_that_is_sown():
    def f(x):
        return value(x.astype(jnp.bfloat16), name="x")

    out = plant_t(f)({"x": np.ones(3, np.float32)}, jnp.zeros(3))
    assert out.dtype == jnp.bfloat16 and out.tolist() == [1.0, 1.0, 1.0]
    out = plant_t(lambda x: value(x, name="x"))({"x": True}, 1.5)
    assert out.dtype == jnp.float32 and out == 1.0


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (np.zeros((2,), np.int32), r"is i32\[2\], but the sown value is i32\[3\]"),
        (np.full((3,), 1.5, np.float32), r"is f32\[3\], but the sown value is i32\[3\]"),
        (np.full((3,), 1j, np.complex64), r"is c64\[3\], but"),
        ([1, 2, 3], r"is PyTreeDef\(\[\*, \*, \*\]\), but the sown value is i32\[3\]"),
    ],
)
def test_planted_values_that_do_not_fit_are_refused_with_the_place_of_what_is_sown(planted, said):
    def f(x):
        return value(x, name="x")

    with pytest.raises(HarvestError, match=said) as caught:
        plant_t(f)({"x": planted}, jnp.zeros(3, jnp.int32))
    assert "sow at" in str(caught.value) and "test_contract.py" in str(caught.value)


def test_a_traced_float_is_not_planted_for_an_integer():
    def f(x):
        return value(x, name="x")

    with pytest.raises(HarvestError, match=r"is f32\[\], but the sown value is i32\[\]"):
        jax.jit(plant_t(f))({"x": 1.0}, 1)
    assert jax.jit(plant_t(f))({"x": 2}, 1.5) == 2.0
    with pytest.raises(HarvestError, match=r"is c64\[\], but the sown value is f32\[\]"):
        jax.jit(plant_t(f))({"x": 1j}, 1.5)


def test_names_that_are_not_sown_are_passed_over():
    assert plant_t(twice_sown)({"z": "anything", "x": 5.0}, 1.0) == 7.0


# --- modes ---------------------------------------------------------------------------------------


def test_strict_refuses_a_name_twice_and_says_where():
    def f(x):
        return value(x, name="x") + value(x, name="x")

    with pytest.raises(ValueError, match="Variable has already been reaped: x") as caught:
        reap_t(f)(1.0)
    assert isinstance(caught.value, JaxprToolError) and "mode='append'" in caught.value.hint
    assert str(caught.value).count("test_contract.py") == 2
    with pytest.raises(ValueError, match="Variable has already been planted: x"):
        plant_t(f)({"x": 3.0}, 1.0)
    assert plant_t(f)({}, 1.0) == 2.0


@pytest.mark.parametrize(
    "modes", [("strict", "append"), ("clobber", "strict"), ("append", "clobber")]
)
def test_one_name_has_one_mode(modes):
    def f(x):
        return value(x, name="x", mode=modes[0]) + value(x, name="x", mode=modes[1])

    pattern = f"reaped: x \\({modes[0]}: sow at .* {modes[1]}: sow at"
    with pytest.raises(HarvestError, match=pattern):
        reap_t(f)(1.0)
    with pytest.raises(HarvestError, match="planted: x"):
        plant_t(f)({"x": 3.0}, 1.0)


def test_append_keeps_all_values_in_order():
    @jax.jit
    def g(x):
        return value(x, name="x", mode="append")

    def f(x):
        return 100 * g(x) + 10 * value(x + 1, name="x", mode="append") + g(x + 2)

    assert reap_t(f)(1.0) == {"x": [1.0, 2.0, 3.0]}
    assert plant_t(f)({"x": [4.0, 5.0, 6.0]}, 1.0) == 456.0
    assert plant_t(f)(reap_t(f)(1.0), 0.0) == f(1.0)
    assert reap_t(g)(1.0) == {"x": 1.0}
    for wrong in (4.0, [4.0], [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(HarvestError, match="'x' is sown 3 times: plant a list of as many"):
            plant_t(f)({"x": wrong}, 1.0)


def test_clobber_keeps_the_last_value_and_plants_one_everywhere():
    def f(x):
        a = value(x, name="x", mode="clobber")
        return a + jax.jit(lambda y: value(10 * y, name="x", mode="clobber"))(x)

    assert call_and_reap_t(f)(1.0) == (11.0, {"x": 10.0})
    assert harvest_t(f)({"x": 4.0}, 1.0) == (8.0, {})


def test_clobbered_values_may_differ_in_type_where_they_are_reaped():
    def f(x):
        value(x, name="x", mode="clobber")
        return value(jnp.stack([x, x]), name="x", mode="clobber")

    assert reap_t(f)(1.0)["x"].tolist() == [1.0, 1.0]
    with pytest.raises(HarvestError, match="'x' is sown with two types"):
        plant_t(f)({"x": 1.0}, 1.0)


# --- lists, tags, scopes --------------------------------------------------------------------------


def test_lists_let_names_through():
    assert reap_t(twice_sown, allowlist=["x"])(1.0) == {"x": 1.0}
    assert reap_t(twice_sown, allowlist="x")(1.0) == {"x": 1.0}
    assert reap_t(twice_sown, blocklist=["x"])(1.0) == {"y": 2.0}
    assert reap_t(twice_sown, allowlist=["x"], blocklist=["x"])(1.0) == {}
    assert reap_t(twice_sown, allowlist=[])(1.0) == {}
    plants = {"x": 5.0, "y": 6.0}
    assert plant_t(twice_sown, allowlist=["x"])(plants, 1.0) == 7.0
    assert plant_t(twice_sown, blocklist=["x"])(plants, 1.0) == 7.0
    assert harvest_t(twice_sown, allowlist=["x"])(plants, 1.0) == (7.0, {})


def test_lists_hold_names_of_scopes_too():
    def f(x):
        return nest(twice_sown, scope="a")(x) + nest(twice_sown, scope="b")(x)

    assert reap_t(f, allowlist=["a"])(1.0) == {"a": {"x": 1.0, "y": 2.0}}
    assert reap_t(f, allowlist=["x"])(1.0) == {"a": {"x": 1.0}, "b": {"x": 1.0}}
    assert reap_t(f, blocklist=["a", "y"])(1.0) == {"b": {"x": 1.0}}


@pytest.mark.parametrize("lists", [{}, {"allowlist": ["x"]}, {"blocklist": ["x", "y"]}])
def test_nothing_under_the_tag_is_sown_after_reaping(lists):
    assert "sow" in primitives(jax.jit(twice_sown), 1.0)
    assert "sow" not in primitives(reap_t(jax.jit(twice_sown), **lists), 1.0)
    assert reap_t(call_and_reap_t(jax.jit(twice_sown), **lists))(1.0) == {}


def test_what_is_not_planted_stays_sown():
    assert reap_t(partial(plant_t(jax.jit(twice_sown)), {"x": 3.0}))(1.0) == {"y": 2.0}


def test_other_tags_stay_sown_unless_exclusive():
    @jax.jit
    def f(x):
        return value(x, name="x") + sow(x, tag="other", name="x")

    assert reap(call_and_reap_t(f), tag="other")(1.0) == {"x": 1.0}
    assert reap(call_and_reap_t(f, exclusive=True), tag="other")(1.0) == {}
    planted = partial(plant_t(f), {"x": 3.0})
    assert call_and_reap(planted, tag="other")(1.0) == (4.0, {"x": 1.0})
    planted = partial(plant_t(f, exclusive=True), {"x": 3.0})
    assert call_and_reap(planted, tag="other")(1.0) == (4.0, {})


def test_a_tag_is_reaped_inside_a_function_that_is_reaped_under_another():
    def inner(x):
        return value(x, name="x") + sow(2 * x, tag="other", name="x")

    def outer(x):
        y, reaps = call_and_reap_t(inner)(x)
        return y + value(reaps["x"], name="x")

    assert call_and_reap(outer, tag="other")(1.0) == (4.0, {"x": 2.0})
    assert call_and_reap_t(outer)(1.0) == (4.0, {"x": 1.0})


def test_scopes_are_nested_dicts():
    inner = nest(twice_sown, scope="inner")

    def f(x):
        return nest(inner, scope="outer")(x) + inner(x) + value(x, name="x")

    one = {"x": 1.0, "y": 2.0}
    assert reap_t(f)(1.0) == {"outer": {"inner": one}, "inner": one, "x": 1.0}
    plants = {"outer": {"inner": {"x": 10.0}}, "inner": {"y": 100.0}}
    out, reaps = harvest_t(jax.jit(f))(plants, 1.0)
    assert out == 10.0 + 2.0 + 1.0 + 100.0 + 1.0
    assert reaps == {"outer": {"inner": {"y": 2.0}}, "inner": {"x": 1.0}, "x": 1.0}
    with pytest.raises(HarvestError, match="'outer' is a scope: it takes a dict of names"):
        plant_t(f)({"outer": 1.0}, 1.0)
    with pytest.raises(HarvestError, match="plants is a dict of names, not list"):
        plant_t(f)([1.0], 1.0)


def test_calls_of_one_scope_share_it():
    def f(x):
        for name in "ab":
            x = nest(partial(value, name=name), scope="s")(x + 1)
        return x

    assert reap_t(f)(1.0) == {"s": {"a": 2.0, "b": 3.0}}
    with pytest.raises(HarvestError, match="already been reaped: s/a"):
        reap_t(lambda x: f(f(x)))(1.0)


def test_a_scope_and_a_value_cannot_have_one_name():
    def f(x):
        return nest(twice_sown, scope="x")(x) + value(x, name="x")

    with pytest.raises(HarvestError, match="'x' is both a sown value and a scope"):
        reap_t(f)(1.0)


def test_scopes_are_there_without_jit_too():
    with jax.disable_jit():
        assert reap_t(nest(twice_sown, scope="s"))(1.0) == {"s": {"x": 1.0, "y": 2.0}}


# --- calls ----------------------------------------------------------------------------------------


def test_calls_stay_calls():
    def f(x):
        return jax.jit(twice_sown)(x) + jax.jit(jnp.sin)(x)

    before, after = primitives(f, 1.0), primitives(call_and_reap_t(f), 1.0)
    assert before.count("jit") == after.count("jit") == 2
    assert primitives(plant_t(f), {"x": 1.0}, 1.0).count("jit") == 2


def test_values_that_a_call_closes_over_are_reaped_and_planted():
    @jax.jit
    def f(x):
        return harvest_t(lambda y: jax.jit(lambda z: value(x + y, name="s") * z)(1.0))({}, x)

    assert f(2.0) == (4.0, {"s": 4.0})
    planted = jax.jit(lambda x: plant_t(lambda: value(x, name="x") + x)({"x": 2 * x}))
    assert planted(3.0) == 9.0


def test_donation_and_names_of_a_jit_are_kept():
    f = jax.jit(twice_sown, donate_argnums=0)
    for wrapped, args in ((call_and_reap_t(f), ()), (plant_t(f), ({"x": 2.0},))):
        (eqn,) = jax.make_jaxpr(wrapped)(*args, 1.0).eqns
        assert eqn.params["name"] == "twice_sown"
        assert sum(eqn.params["donated_invars"]) == 1 and eqn.params["donated_invars"][-1]
        assert len(eqn.params["donated_invars"]) == len(eqn.invars) == len(args) + 1


def test_a_body_that_two_calls_share_stays_shared():
    @jax.jit
    def g(x):
        return value(jnp.sin(x), name="x", mode="append")

    jaxpr = jax.make_jaxpr(call_and_reap_t(lambda x: g(g(x))))(1.0)
    first, second = (e.params["jaxpr"] for e in jaxpr.eqns)
    assert open_jaxpr(first) is open_jaxpr(second)


def test_a_body_that_two_scopes_share_has_a_name_in_each():
    g = jax.jit(twice_sown)

    def f(x):
        return nest(g, scope="a")(x) + nest(g, scope="b")(10 * x)

    reaps = {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 10.0, "y": 11.0}}
    assert call_and_reap_t(f)(1.0) == (24.0, reaps)
    assert plant_t(f)({"b": {"x": 0.0}}, 1.0) == 14.0


def test_remat_is_reaped_and_planted_and_stays():
    f = jax.checkpoint(twice_sown, prevent_cse=(True,))
    assert call_and_reap_t(f)(1.0) == (3.0, {"x": 1.0, "y": 2.0})
    assert plant_t(f)({"x": 5.0}, 1.0) == 7.0
    assert primitives(plant_t(f), {"x": 5.0}, 1.0)[0] == primitives(f, 1.0)[0]


def test_pmap_keeps_the_mapped_axis():
    f = jax.pmap(lambda x: value(2 * x, name="x") + 1)
    x = jnp.arange(8.0).reshape(8, 1)
    y, reaps = call_and_reap_t(f)(x)
    assert y.tolist() == (2 * x + 1).tolist() and reaps["x"].tolist() == (2 * x).tolist()
    assert plant_t(f)({"x": x}, x).tolist() == (x + 1).tolist()


def test_effects_happen_once_and_in_order():
    printed = []

    def f(x):
        jax.debug.callback(printed.append, x, ordered=True)
        y = value(x + 1, name="y")
        jax.debug.callback(printed.append, y, ordered=True)
        return y

    for wrapped in (reap_t(f), call_and_reap_t(f), jax.jit(reap_t(jax.jit(f)))):
        printed.clear()
        jax.block_until_ready(wrapped(1.0))
        jax.effects_barrier()
        assert printed == [1.0, 2.0]
    printed.clear()
    plant_t(f)({"y": 5.0}, 1.0)
    jax.effects_barrier()
    assert printed == [1.0, 5.0]
