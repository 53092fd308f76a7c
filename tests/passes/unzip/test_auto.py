"""Variables that unzip chooses: the fewest bytes that separate keys from late values."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxprtool import jaxcompat, nest, trace, unzip, variable
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import top_jaxpr, type_check
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.unzip import UnzipError, unzipped
from jaxprtool.passes.unzip.auto import sow_cut
from jaxprtool.passes.unzip.split import at_positions
from jaxprtool.primitives import sow_p
from tests.programs import same, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.init_apply import prove_unzip
from tests.programs.recorder import record
from tests.programs.samples import sample_files
from tests.programs.values import first_value_difference, values_agree
from tests.share import first_and_proofs
from tests.sweep.corpora import RandomPrograms
from tests.sweep.parts import Part

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def drawn(key, *shape):
    return jax.random.normal(key, shape)


def shapes(variables):
    return jax.tree.map(lambda leaf: leaf.aval.str_short(short_dtypes=True), variables)


def primitives(program):
    return {eqn.primitive.name for eqn in equations(top_jaxpr(program))}


def check(fun, *args, expected, **options):
    """Unzip `fun`, compare the results, and the types of its variables. Return the programs."""
    init, apply = unzip(fun, **options)(*args)
    for program in init, apply:
        type_check(program)
    early = options.get("known", options.get("key_args", 0))
    early = (early,) if isinstance(early, int) else early
    variables = init(*(args[i] for i in early))
    results = apply(variables, *(arg for i, arg in enumerate(args) if i not in early))
    for found, wanted in zip(*map(jax.tree.leaves, (results, fun(*args))), strict=True):
        np.testing.assert_allclose(*map(_numbers, (found, wanted)), rtol=2e-5, atol=1e-6)
    assert shapes(variables) == expected
    assert not {"sow"} & primitives(apply)
    return init, apply


def _numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def check_auto(fun, *args, expected, **options):
    """Like `check`, for keys. apply draws nothing, unless a key is among the variables."""
    init, apply = check(fun, *args, expected=expected, auto=True, **options)
    if not any("key<" in leaf for leaf in jax.tree.leaves(expected)):
        assert not any(name.startswith(("random_", "threefry")) for name in primitives(apply))
    return init, apply


# --- functions written without unzip in mind ----------------------------------------------------


def dense(key, x):
    w = 0.1 * drawn(key, 4, 3)
    return x @ w


def mlp(key, x):
    layers = []
    for size in (8, 2):
        key, sub = jax.random.split(key)
        w = drawn(sub, x.shape[-1] if not layers else 8, size)
        layers.append({"w": w, "b": jnp.zeros(size)})
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def dropout(key, x):
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(keep, x / 0.5, 0)


def autoencoder(key, x):
    eps = drawn(key, *x.shape)
    return x + jnp.exp(x) * eps


def sampled(key, x):
    return jax.random.categorical(key, x)


def transposed(key, x):
    w = drawn(key, 3, 4)
    return x @ w.T


def spread(key, x):
    b = drawn(key, 4)
    return x + jnp.broadcast_to(b, (2, 4))


def gradient(key, x):
    return jax.grad(lambda x: mlp(key, x).sum())(x)


def activated(key, x):
    w = jax.nn.silu(drawn(key, 4, 3))
    return jax.nn.relu(x @ w)


def two_uses(key, x):
    w = drawn(key, 4)
    return x + w, x * jnp.exp(w)


def seeded(seed, x):
    w = drawn(jax.random.key(3 * seed + 1), 4)
    return x * w


def without_key(key, x):
    return jnp.sin(x)


def without_rest(key, x):
    w = drawn(key, 4)
    return w.sum()


@pytest.mark.parametrize(
    ("fun", "expected"),
    first_and_proofs(
        [
            (dense, {"w": "f32[4,3]"}),
            (mlp, {"w": "f32[4,8]", "w_1": "f32[8,2]"}),
            (dropout, {"keep": "bool[2,4]"}),
            (autoencoder, {"eps": "f32[2,4]"}),
            (sampled, {"gumbel": "f32[2,4]"}),
            (transposed, {"w": "f32[3,4]"}),
            (spread, {"b": "f32[4]"}),
            (gradient, {"w": "f32[4,8]", "w_1": "f32[8,2]"}),
            (activated, {"w": "f32[4,3]"}),
            (two_uses, {"w": "f32[4]"}),
            (without_rest, {"without_rest": "f32[]"}),
        ]
    ),
)
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_a_function_of_a_key_splits(fun, expected, key):
    check_auto(fun, key, X, expected=expected)


@pytest.mark.parametrize(("key", "options"), [(KEY, {}), (jax.random.PRNGKey(0), {"key_args": 0})])
def test_an_unused_key_is_recognized_by_type_or_position(key, options):
    check_auto(without_key, key, X, expected={}, **options)


def test_a_seed_is_a_key():
    check_auto(seeded, 3, X, expected={"w": "f32[4]"})


def test_small_types_count_fewer_bytes():
    def quantized(key, x):
        w = drawn(key, 4)
        q = jnp.clip(jnp.round(w), -7, 7).astype("int4")
        return x * q.astype("float32")

    check_auto(quantized, KEY, X, expected={"q": "i4[4]"})


def test_several_arguments_may_be_keys():
    def fun(x, first, second):
        return x * drawn(first, 4) + drawn(second, 4)

    expected = {"normal": "f32[4]", "normal_1": "f32[4]"}
    check_auto(fun, X, KEY, jax.random.key(1), key_args=(1, 2), expected=expected)


def test_a_reshaped_key_is_a_key():
    def fun(a, x):
        return x * jnp.broadcast_to(a[None], (2, 4))

    check_auto(fun, jnp.ones(4), X, key_args=0, expected={"a": "f32[4]"})


def test_a_sown_value_keeps_its_name():
    def fun(key, x):
        return x @ nest(lambda: variable(drawn(key, 4, 3), name="w"), scope="layer")()

    check_auto(fun, KEY, X, expected={"w": "f32[4,3]"})


# --- keys that are needed late ------------------------------------------------------------------


def test_a_key_that_is_a_result_is_an_additional_variable():
    def fun(key, x):
        key, sub = jax.random.split(key)
        w = drawn(sub, 4)
        return x * w, key

    expected = {"key": "key<fry>[]", "w": "f32[4]"}
    check_auto(fun, KEY, X, expected=expected)


@pytest.mark.proof
def test_a_key_for_input_dependent_draws_is_a_variable_and_weights_are_drawn_early():
    def fun(key, x):
        first, second = jax.random.split(key)
        w = drawn(first, 4)
        return jax.random.poisson(second, jnp.exp(x * w))

    _, apply = check_auto(fun, KEY, X, expected={"w": "f32[4]", "second": "key<fry>[]"})
    assert "erf_inv" not in primitives(apply)


@pytest.mark.proof
def test_a_loop_of_unknown_length_takes_its_key():
    def fun(key, x):
        def body(carry):
            count, x = carry
            w = drawn(jax.random.fold_in(key, count), 4, 4)
            return count + 1, x @ w

        return jax.lax.while_loop(lambda c: c[1].sum() < 9 - c[0], body, (0, x * 0 + 0.1))

    check_auto(fun, KEY, X, expected={"key": "key<fry>[]"})


# --- calls, loops and branches ------------------------------------------------------------------


@jax.jit
def layer(w, x):
    return jnp.tanh(x @ w)


@jax.jit
def own_layer(key, x):
    w = drawn(key, 4, 4)
    return jnp.tanh(x @ w)


def shared_calls(key, x):
    for sub in jax.random.split(key):
        x = layer(drawn(sub, 4, 4), x)
    return x


def shared_calls_that_draw(key, x):
    for sub in jax.random.split(key):
        x = own_layer(sub, x)
    return x


def rematerialized(key, x):
    return jax.grad(lambda x: jax.checkpoint(own_layer)(key, x).sum())(x)


def scanned_keys(key, x):
    def step(x, key):
        w = drawn(key, 4, 4)
        return jnp.tanh(x @ w), None

    return jax.lax.scan(step, x, jax.random.split(key, 5))[0]


def carried_key(key, x):
    def step(carry, _):
        key, x = carry
        key, sub = jax.random.split(key)
        w = drawn(sub, 4, 4)
        return (key, jnp.tanh(x @ w)), x.sum()

    (_, x), sums = jax.lax.scan(step, (key, x), None, length=6)
    return x, sums


def nested_loops(key, x):
    def outer(x, i):
        def inner(x, j):
            u = drawn(key, 4, 4)
            v = drawn(jax.random.fold_in(key, i), 4, 4)
            w = drawn(jax.random.fold_in(key, j), 4, 4)
            return jnp.tanh(x @ u @ v @ w), None

        return jax.lax.scan(inner, x, jnp.arange(2))[0], None

    return jax.lax.scan(outer, x, jnp.arange(3))[0]


def last_of_a_loop(key, x):
    def step(h, _):
        return jnp.sin(h), None

    last, _ = jax.lax.scan(step, drawn(key, 4), None, length=9)
    return x + last


def counted(key, x):
    def body(carry):
        count, x = carry
        w = drawn(jax.random.fold_in(key, count), 4, 4)
        return count + 1, jnp.tanh(x @ w)

    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))


def uncounted_with_one_weight(key, x):
    def body(carry):
        count, x = carry
        w = drawn(key, 4, 4)
        return count + 1, jnp.tanh(x @ w)

    return jax.lax.while_loop(lambda c: (c[0] < 3) & (c[1].sum() < 99), body, (0, x))


def branches(key, x):
    def either(key, x):
        w = drawn(key, 4, 3)
        return x @ w

    def other(key, x):
        v = jax.random.uniform(key, (4, 3))
        return x @ v

    return jax.lax.cond(x.sum() > 0, either, other, key, x)


def early_branches(key, x):
    first, second = jax.random.split(key)
    w = jax.lax.cond(jax.random.bernoulli(first), jnp.sin, jnp.cos, drawn(second, 4))
    return x * w


@pytest.mark.parametrize(
    ("fun", "expected"),
    first_and_proofs(
        [
            (shared_calls, {"w": "f32[4,4]", "w_1": "f32[4,4]"}),
            (shared_calls_that_draw, {"w": "f32[4,4]", "w_1": "f32[4,4]"}),
            (scanned_keys, {"w": "f32[5,4,4]"}),
            (carried_key, {"w": "f32[6,4,4]"}),
            (nested_loops, {"u": "f32[4,4]", "v": "f32[3,4,4]", "w": "f32[3,2,4,4]"}),
            (last_of_a_loop, {"last": "f32[4]"}),
            (counted, {"w": "f32[3,4,4]"}),
            (uncounted_with_one_weight, {"w": "f32[4,4]"}),
            (branches, {"v": "f32[4,3]", "w": "f32[4,3]"}),
            (early_branches, {"w": "f32[4]"}),
        ]
    ),
)
def test_a_cut_lies_as_deep_as_necessary(fun, expected):
    check_auto(fun, KEY, X, expected=expected)


def test_values_that_a_gradient_recomputes_are_a_variable_in_each_place():
    _, apply = unzip(rematerialized, auto=True)(KEY, X)
    assert not any(name.startswith("random_") for name in primitives(apply))


def test_a_shard_of_a_variable_is_counted_once():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(key, x):
        w = drawn(key, 4, 3)
        return x @ w

    def fun(key, x):
        return jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))(key, x)

    check_auto(jax.jit(fun), KEY, X, expected={"w": "f32[4,3]"})


def test_a_call_without_variables_is_not_split():
    init, apply = unzip(shared_calls, auto=True)(KEY, X)
    names = [eqn.params.get("name") for eqn in apply.jaxpr.eqns]
    assert names == ["layer", "layer"]
    assert "layer" not in [eqn.params.get("name") for eqn in equations(top_jaxpr(init))]


def test_effects_happen_once():
    def fun(key, x):
        w = drawn(key, 4)
        jax.debug.print("{}", w.sum())
        return x * w

    init, apply = unzip(fun, auto=True)(KEY, X)
    prints = [any("debug" in name for name in primitives(half)) for half in (init, apply)]
    assert sum(prints) == 1


def note(x):
    jax.debug.callback(lambda x: record(0, False, x), x)


def noted_where(flag, value):
    return jax.lax.cond(flag, lambda: (note(value), 1)[1], lambda: 0)


def noted_while(u, value):
    def body(count):
        note(value)
        return count + 0.3

    return jax.lax.while_loop(lambda count: count < u, body, 0.0)


EFFECTS_IN_BRANCHES_AND_LOOPS = {
    "an early value where a late one decides": lambda u, x: noted_where(x > 0, u),
    "a late value where an early one decides": lambda u, x: noted_where(u > 0, x),
    "a late value for as long as an early one says": lambda u, x: noted_while(u, x),
    "an early value for as long as a late one says": lambda u, x: noted_while(x, u),
    "an early decision inside a late one": lambda u, x: jax.lax.cond(
        x > 0, lambda: noted_where(u > 0, 1.0), lambda: 2
    ),
    "an early decision inside a late one, in a call": lambda u, x: jax.lax.cond(
        x > 0, lambda: jax.jit(lambda: noted_where(u > 0, 1.0))(), lambda: 2
    ),
    "a late decision inside an early one": lambda u, x: jax.lax.cond(
        u > 0, lambda: noted_where(x > 0, 1.0), lambda: 2
    ),
    "a loop of an early length inside a late decision": lambda u, x: jax.lax.cond(
        x > 0, lambda: noted_while(u, 1.0), lambda: 2.0
    ),
    "a late decision inside a loop of an early length": lambda u, x: jax.lax.while_loop(
        lambda i: i < u, lambda i: (noted_where(x > 0, 1.0), i + 0.3)[1], 0.0
    ),
    "each of the early values inside a late decision": lambda u, x: jax.lax.cond(
        x > 0, lambda: jax.lax.scan(lambda c, v: (c, note(v)), 0, u * jnp.arange(3.0))[0], lambda: 2
    ),
}


@pytest.mark.parametrize("x", [0.5, -0.5])
@pytest.mark.parametrize("once", [False, True], ids=["auto", "known"])
@pytest.mark.parametrize("what", EFFECTS_IN_BRANCHES_AND_LOOPS)
def test_operands_of_a_late_effect_are_variables_even_without_a_result(what, once, x):
    def fun(u, x):
        EFFECTS_IN_BRANCHES_AND_LOOPS[what](jnp.sin(u), x)
        return x

    args = [jnp.float32(0.9), jnp.float32(x)]
    sown = sow_cut(trace(fun, *args), [True, False], "cut", once)
    proof = prove_unzip(sown, 0, args, tag="cut", gradients=False, compiled=False)
    assert proof.variables == 1


@pytest.mark.proof
def test_refs_stay_in_apply():
    def fun(key, x):
        ref = jax.new_ref(jnp.zeros(4))
        ref[...] += drawn(key, 4)
        return x * ref[...]

    check_auto(jax.jit(fun), KEY, X, expected={"ref": "f32[4]"})


# --- arguments known early ----------------------------------------------------------------------


@pytest.mark.proof
def test_computations_of_known_arguments_are_done_once():
    def fun(a, x):
        u, _, v = jnp.linalg.svd(a)
        rotation = u @ v
        mask = a[0] > 0
        return x @ rotation * mask + jnp.broadcast_to(jnp.sin(a[0]), (2, 4))

    a = drawn(KEY, 4, 4)
    expected = {"rotation": "f32[4,4]", "mask": "bool[4]", "fun": "f32[4]"}
    _, apply = check(fun, a, X, known=0, expected=expected)
    assert primitives(apply) <= {
        *("dot_general", "broadcast_in_dim", "convert_element_type", "mul", "add", "jit"),
    }


def test_a_known_argument_that_is_used_directly_is_a_variable():
    def fun(params, x):
        return x * params["w"][None] + params["b"].astype("float32")

    params = {"w": jnp.ones(4), "b": jnp.ones(4, "bfloat16")}
    expected = {"params": {"w": "f32[4]", "b": "bf16[4]"}}
    check(fun, params, X, known=0, expected=expected)


def test_known_values_are_never_recomputed_even_if_that_needs_fewer_bytes():
    def fun(n, x):
        table = jnp.arange(16.0) * n
        return x.sum() * table

    check(fun, jnp.float32(3), X, known=0, expected={"table": "f32[16]"})
    check(fun, jnp.float32(3), X, auto=True, key_args=0, expected={"table": "f32[16]"})


def test_a_loop_over_known_values_runs_once_and_one_over_others_keeps_what_it_can():
    def fun(w, x):
        total, _ = jax.lax.scan(lambda c, row: (jnp.sin(c + row), None), jnp.zeros(4), w)

        def step(h, row):
            scaled = jnp.exp(row)
            both = jnp.cos(w).sum()
            return jnp.tanh(h * scaled + both), None

        return jax.lax.scan(step, x, w)[0] + total

    w = drawn(KEY, 5, 4)
    expected = {"total": "f32[4]", "both": "f32[]", "scaled": "f32[5,4]"}
    _, apply = check(fun, w, X, known=0, expected=expected)
    assert not {"sin", "cos", "exp"} & primitives(apply)


# --- optimality -----------------------------------------------------------------------------------


def straight_line(rng):
    """Return a function of two early and one late argument, and its early values."""
    sizes = [rng.choice((1, 2, 3)) for _ in range(2)]
    steps = [(rng.randrange(i + 2), rng.randrange(i + 2), rng.randint(1, 3)) for i in range(5)]
    uses = rng.sample(range(2, 7), rng.randint(1, 3))

    def fun(a, b, x):
        values = [a, b]
        for first, second, size in steps:
            total = jnp.sin(values[first]).sum() * values[second].sum()
            values.append(total * jnp.arange(1.0, size + 1))
        return [x + values[i].sum() * values[i] for i in uses if values[i].shape == (1,)] + [
            x[:, None] * values[i] for i in uses
        ]

    return fun, [jnp.ones(n) for n in sizes]


@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_of_values_is_smaller(seed):
    fun, early = straight_line(random.Random(seed))
    program = Dce()(trace(fun, *early, jnp.ones(3)))
    arguments = at_positions(program, (0, 1))
    found = unzipped(sow_cut(program, arguments.marks, "cut", False), "cut", arguments)
    smallest = sum(bytes_of(v.avals[0]) for v in found.variables)
    values = [
        v
        for eqn in program.jaxpr.eqns
        for v in eqn.outvars
        if depends(program.jaxpr, v, program.jaxpr.invars[:2])
        and not depends(program.jaxpr, v, program.jaxpr.invars[2:])
    ]
    cuts = 0
    for count in range(3):
        for chosen in itertools.combinations(values, count):
            if sum(bytes_of(v.aval) for v in chosen) < smallest:
                with pytest.raises(UnzipError, match="do not cut"):
                    unzipped(sown_by_hand(program, set(chosen)), "cut", arguments)
                cuts += 1
    assert cuts


def bytes_of(aval):
    return aval.size * aval.dtype.itemsize


def depends(jaxpr, var, arguments):
    reached = set(arguments)
    for eqn in jaxpr.eqns:
        if any(v in reached for v in eqn.invars if hasattr(v, "count") or not hasattr(v, "val")):
            reached.update(eqn.outvars)
    return var in reached


def sown_by_hand(program, chosen):
    tree, eqns, names = jax.tree.structure(0), [], {}
    for eqn in program.jaxpr.eqns:
        operands = [v if hasattr(v, "val") else names.get(v, v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=operands))
        for var in eqn.outvars:
            if var in chosen:
                names[var] = jaxcompat.Var(var.aval)
                params = {"tag": "cut", "name": str(len(names)), "mode": "strict", "tree": tree}
                eqns.append(
                    jaxcompat.new_jaxpr_eqn([var], [names[var]], sow_p, params, set(), ctx=eqn.ctx)
                )
    j = program.jaxpr
    outvars = [v if hasattr(v, "val") else names.get(v, v) for v in j.outvars]
    new = jaxcompat.new_jaxpr(j.constvars, j.consts, j.invars, outvars, eqns, j.debug_info)
    return program.replace(jaxpr=new)


# --- random programs and samples ----------------------------------------------------------------

#: Why unzip may refuse a program with effects: init runs before all of apply.
REFUSED = ("an ordered effect that belongs to init", "ordered effects of both init and apply")


def prove(case, rng, *, once):
    """Choose variables for some of the arguments and check both halves. Return their number."""
    with case.setting():
        program, args = case.program(), case.arguments()
        positional, _ = jax.tree.unflatten(program.in_tree, range(len(args)))
        keys = tuple(i for i in range(len(positional)) if rng.random() < 0.5)
        try:
            sown = sow_cut(program, at_positions(program, keys).marks, "cut", once)
            type_check(sown)
            same(program, sown, args, gradients=False)
            proof = prove_unzip(sown, keys, args, tag="cut", gradients=False, compiled=False)
        except UnsupportedError as error:
            assert any(why in error.message for why in REFUSED), error.message
            return "refused"
    return proof.variables


def prove_random(number, case):
    outcome = prove(case, random.Random(number), once=bool(number % 2))
    return outcome if outcome == "refused" else "split"


@pytest.mark.proof  # drawing the corpus takes two CPU seconds
@pytest.mark.parametrize("chunk", range(2))
def test_random_programs_split(chunk):
    outcomes = prove_corpus(8, prove_random, start=chunk, step=2)
    assert outcomes.total() >= 4


SWEEP = [
    Part(
        "unzip, auto: random programs",
        RandomPrograms(1500, first_seed=500),
        prove_random,
        expected=lambda n: n["refused"] < 0.1 * n.total(),
    ),
]


@pytest.mark.sweep
@pytest.mark.parametrize("file", sample_files())
@pytest.mark.parametrize("once", [False, True], ids=["auto", "known"])
def test_samples_split(file, once):
    for case in sample_programs(file):
        program, args = case.program(), case.arguments()
        tree = program.in_tree
        positional, _ = jax.tree.unflatten(tree, range(len(args)))
        for keys in [(i,) for i in range(len(positional))] + [tuple(range(len(positional)))]:
            arguments = at_positions(program, keys)
            sown = sow_cut(program, arguments.marks, "cut", once)
            parts = unzipped(sown, "cut", arguments)
            type_check(parts.init)
            type_check(parts.apply)
            given, kwargs = jax.tree.unflatten(tree, args)
            variables = parts.init(*(given[i] for i in keys))
            others = (arg for i, arg in enumerate(given) if i not in keys)
            results = jax.tree.leaves(parts.apply(variables, *others, **kwargs))
            wanted = jax.tree.leaves(program(*given, **kwargs))
            assert first_value_difference(wanted, results, values_agree) is None, (case.name, keys)
