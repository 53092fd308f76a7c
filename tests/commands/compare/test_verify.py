"""verify runs two programs on the same inputs, and names the first difference."""

import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxprtool.commands.compare.verify import Runs, verify
from jaxprtool.errors import ArgumentsError, CheckError, UnsupportedError
from jaxprtool.execute.running.rounding import WideProgram
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.jaxcompat import jaxpr_as_fun
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.sizes.mask import Specialize
from tests.execute.programs import program

X = jnp.arange(1.0, 4.0)


def rewritten(before, rule):
    """Return a program with equations replaced, at every depth."""
    return before.replace(jaxpr=map_equations(before.jaxpr, rule))


def swapped(before, old, new):
    """Return a program with one binary primitive replaced by another."""
    other = {"add": lax.add_p, "mul": lax.mul_p, "sub": lax.sub_p, "ge": lax.ge_p}[new]

    def rule(eqn):
        return [eqn.replace(primitive=other)] if eqn.primitive.name == old else None

    return rewritten(before, rule)


def refuses(before, after, *args, match):
    with pytest.raises(CheckError, match=match) as caught:
        verify(before, after, args or None)
    assert caught.value.exit_code == 1
    return dict(caught.value.details)


def line_of(text):
    """Return the line of this file with a comment."""
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))


def sums(x):
    y = jnp.sin(x)
    z = y + x  # the sum
    return {"out": jnp.tanh(z), "same": y}


# --- --- agreement --------------------------------------------------------------------------------


def test_a_program_agrees_with_itself_and_with_an_equivalent_one():
    before = program(sums, X)
    verify(before, before)
    verify(before, program(lambda x: {"same": jnp.sin(x), "out": jnp.tanh(x + jnp.sin(x))}, X))
    doubled = program(lambda x: x * 2.0 / 3.0, X)
    verify(doubled, program(lambda x: x * (2.0 / 3.0), X), (X,))


def test_nans_infinities_and_keys_agree():
    def special(x):
        return x / 0, jnp.sqrt(-x), jax.random.split(jax.random.key(3))

    verify(program(special, X), program(lambda x: special(x * 1), X))


def test_small_results_are_compared_by_their_own_size():
    small = jnp.linspace(1e-9, 2e-9, 3)
    before = program(jnp.sinh, small)
    refuses(before, program(lambda x: jnp.sinh(x) * 1.0001, small), small, match="differs in 3")
    verify(before, program(lambda x: jnp.sinh(x * 2.0 / 2.0), small), (small,))


def test_different_rounding_by_xla_is_not_a_difference(monkeypatch):
    """If the results of compiled loops differ, those of single equations decide."""
    before, after = program(jnp.sin, X), program(lambda x: jnp.sin(x * 1), X)

    def compiled(jaxpr):
        noise = 0.1 if jaxpr is after.jaxpr else 0.0
        return lambda *args: [y + noise for y in jaxpr_as_fun(jaxpr)(*args)]

    monkeypatch.setattr("jaxprtool.jaxcompat.jaxpr_as_fun", compiled)
    verify(before, after, (X,))
    wrong = program(jnp.cos, X)
    after = wrong
    refuses(before, wrong, X, match="computes something else")


@pytest.fixture
def seeds(monkeypatch):
    """The seeds of the random errors of all runs in double precision; 0 for runs without."""
    drawn, run = [], WideProgram.run

    def counted(self, arguments, seed=0, **sizes):
        drawn.append(seed)
        return run(self, arguments, seed, **sizes)

    monkeypatch.setattr(WideProgram, "run", counted)
    return drawn


@pytest.mark.proof
def test_calls_that_xla_fuses_need_no_estimate_of_errors(seeds):
    f = jax.jit(lambda x: jnp.tanh(x * 3.1 + 0.7 * jnp.sin(x)) - x)
    x = jnp.linspace(-9, 9, 999)
    verify(program(f, x), program(f.__wrapped__, x), (x,))
    assert not seeds


@pytest.mark.proof
def test_errors_are_estimated_once_for_several_rewrites(seeds):
    numbers = np.random.default_rng(0).standard_normal(999).astype(np.float32)
    x = jnp.concatenate([numbers, -numbers])  # the sum is one of rounding errors
    first, *others = (
        program(f, x) for f in (jnp.sum, lambda x: jnp.cumsum(x)[-1], lambda x: x @ (0 * x + 1))
    )
    runs = Runs(first, [x])
    for after in others:
        runs = runs.compare(after)
    assert seeds.count(1) == 2  # by the dtypes of the program, and in double precision


@pytest.mark.proof
def test_infinite_masks_have_no_rounding_errors():
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((9, 99)), jnp.float32)

    def attention(total):
        def f(x):
            weights = jax.nn.softmax(jnp.where(jnp.arange(99) < 80, x, -jnp.inf))
            return total((weights * (x - (weights * x).sum(1, keepdims=True))).ravel())

        return f

    before = program(attention(jnp.sum), scores)
    verify(before, program(attention(lambda x: jnp.cumsum(x)[-1]), scores), (scores,))


WRONG_FOR_OTHER_INTEGERS = {
    "negative": (abs, lambda n: n),
    "rounded towards zero": (lambda n: n // 2, lambda n: lax.div(n, jnp.int32(2))),
    "large": (lambda n: jnp.minimum(n, 50), lambda n: n),
    "a predicate": (lambda n: lax.select_n(~n, 1.0, 2.0), lambda n: lax.select_n(n, 2.0, 1.0)),
    "beyond the last index": (lambda n: jnp.take(X, n), lambda n: X[jnp.clip(n, 0, 2)]),
}


@pytest.mark.parametrize("name", WRONG_FOR_OTHER_INTEGERS)
def test_negative_and_large_integers_are_tried(name):
    before, after = (
        program(lambda n, fun=fun: fun(n) * 1, jnp.int32(1))
        for fun in WRONG_FOR_OTHER_INTEGERS[name]
    )
    details = refuses(before, after, match="computes something else")
    assert "seed 0" in details["inputs"]


def test_a_program_that_raises_for_other_integers_is_run_on_small_ones():
    def fun(n):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(lambda n: np.int32(range(9)[n]), shape, n) + n

    verify(program(fun, jnp.int32(1)), program(fun, jnp.int32(1)))


def test_arguments_may_be_dropped():
    before = program(lambda x, y: x + 1, X, X)
    after = program(lambda x: x + 1, X)
    verify(before, after, (X, X))
    wrong = program(lambda x: x + 2, X)
    refuses(before, wrong, X, X, match=r"result\[0\] differs in 3 of 3")


# --- --- differences ------------------------------------------------------------------------------


def test_the_first_different_result_is_named_with_its_error():
    before = program(lambda x: (x, x.at[1].add(2.0)), X)
    after = program(lambda x: (x, x.at[1].add(2.5)), X)
    found = refuses(before, after, X, match=r"result\[1\] differs in 1 of 3 elements")
    assert found == {
        "result": "result[1], float32[3]",
        "differs in": "1 of 3 elements, the first at [1]",
        "before": "4.0",
        "after": "4.5",
        "largest error": "0.5 absolute, 0.125 relative",
        "tolerance": found["tolerance"],
        "first equation": found["first equation"],
        "instead of": found["instead of"],
        "inputs": "the given values",
    }
    tolerances = re.fullmatch("(.*) absolute, (.*) relative, for the first", found["tolerance"])
    assert 1e-7 < float(tolerances[2]) < 1e-5
    assert float(tolerances[1]) == pytest.approx(4 * float(tolerances[2]), rel=0.01)


def test_a_traceback_has_the_details_as_notes():
    before, after = program(lambda x: x, X), program(lambda x: x * 2, X)
    with pytest.raises(CheckError) as caught:
        verify(before, after, seed=3)
    shown = traceback.format_exception_only(caught.value)
    assert shown[0].endswith("computes something else: result[0] differs in 3 of 3 elements\n")
    assert "  inputs          random values, seed 3\n" in shown


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: x > 2, lambda x: x >= 2),
        (lambda x: jnp.int32(x), lambda x: jnp.int32(x).at[2].add(1)),
        (lambda x: x / 0, lambda x: -x / 0),
        (lambda x: x * jnp.nan, lambda x: x),
        (lambda x: jax.random.key(1), lambda x: jax.random.key(2)),
        (lambda x: x * 1.0001, lambda x: x),
    ],
)
def test_different_values_are_reported(before, after):
    refuses(program(before, X), program(after, X), X, match="computes something else")


def test_types_and_results_must_be_the_same():
    before = program(lambda x: x, X)
    refuses(before, program(lambda x: x.astype("bfloat16"), X), match=r"bf16\[3\] after")
    refuses(before, program(lambda x: (x, x), X), match="returns result")
    other = before.replace(arg_names=("other",))
    refuses(before, other, match="takes an argument 'other'")


# --- the first equation -----------------------------------------------------------------------


def test_the_first_equation_that_differs_is_named():
    before = program(sums, X)
    found = refuses(before, swapped(before, "add", "mul"), X, match="first equation")
    place = f"tests/commands/compare/test_verify.py:{line_of('the sum')}"
    assert found["first equation"].startswith(f"mul at {place}, giving float32[3] [")
    assert found["first equation"].endswith("], from the same values as before")
    assert found["instead of"].startswith(f"add at {place}, giving float32[3] [")


def test_a_third_party_primitive_may_return_a_literal():
    same = Primitive("same")
    same.def_impl(lambda x: x)
    same.def_abstract_eval(lambda x: x)
    mlir.register_lowering(same, lambda ctx, x: [x])
    before = program(lambda x: jnp.tanh(x) * same.bind(0.5), X)
    assert "same 0.5" in str(before.jaxpr)
    refuses(before, swapped(before, "mul", "add"), X, match="differs in 3 of 3")


@pytest.mark.parametrize("where", ["scan", "while", "cond", "jit", "remat", "refs"])
def test_the_equation_is_named_inside_loops_branches_and_calls(where):
    def inner(x):
        y = jnp.sin(x)
        return jnp.cos(y) * y  # deep inside

    def outer(x):
        match where:
            case "scan":
                return lax.scan(lambda c, row: (inner(c), c * row), x, jnp.ones(2))
            case "while":
                return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(s[1])), (0, x))
            case "cond":
                return lax.cond(x[0] > 0, inner, lambda x: x, x)
            case "jit":
                return jax.jit(inner)(x)
            case "remat":
                return jax.checkpoint(inner)(x)
        ref = jax.new_ref(x)
        lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(..., inner(ref[...])), None)
        return ref[...]

    before = program(outer, X)
    after = swapped(before, "mul", "sub")
    line = line_of("deep inside")
    refuses(before, after, X, match=rf"first equation +sub at \S+:{line},")


@pytest.mark.proof
def test_a_wrong_predicate_is_found_even_if_its_value_occurs_elsewhere():
    def f(x):
        other = x[0] < 0
        return lax.cond(x[0] < 2, jnp.sin, jnp.cos, x), other  # predicate

    before = program(f, X)

    def rule(eqn):
        is_predicate = eqn.primitive.name == "lt" and eqn.invars[1].val == 2
        return [eqn.replace(primitive=lax.ge_p)] if is_predicate else None

    found = refuses(before, rewritten(before, rule), X, match="first equation")
    place = f"tests/commands/compare/test_verify.py:{line_of('predicate')}"
    assert found["first equation"].startswith(f"ge at {place}, giving bool[] False,")


def test_swapped_results_blame_no_equation():
    before = program(lambda x: (jnp.sin(x), jnp.cos(x)), X)
    first, second = before.jaxpr.outvars
    after = program(lambda x: jaxpr_as_fun(before.jaxpr)(x)[::-1], X)
    assert first is not second
    refuses(before, after, X, match="different values are passed on")


@pytest.mark.proof
def test_new_equations_of_a_correct_rewrite_are_not_blamed():
    def before(x, y):
        z = jnp.dot(x, y).T
        return jnp.exp(z - 1)

    def after(x, y):
        z = jnp.dot(y.T, x.T)
        return jnp.exp(z + 1)  # wrong

    a, b = jnp.arange(6.0).reshape(2, 3) / 10, jnp.arange(12.0).reshape(3, 4) / 10
    args = a, b
    line = line_of("wrong")
    refuses(
        program(before, *args),
        program(after, *args),
        *args,
        match=rf"first equation +add at \S+:{line},",
    )


# --- effects ----------------------------------------------------------------------------------


def prints(x, *, order=("first", "second"), scale=1.0, ordered=True):
    for name in order:
        jax.debug.print(name + " {}", x * scale, ordered=ordered)
    return x


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"order": ("first",)}, "is no longer called"),
        ({"order": ("first", "second", "third")}, "is called, but was not before"),
        ({"scale": 2.0}, "effect 1 .* receives different values"),
        ({"order": ("second", "first")}, "effect 1 .* something else: .*first .* against second"),
        ({"order": ("first", "other")}, "effect 2 .* something else: .*second .* against other"),
        ({"ordered": False}, "effect 1 .* ordered: True against False"),
    ],
)
def test_effects_must_be_the_same(changed, what):
    before = program(prints, X)
    verify(before, program(prints, X))
    refuses(before, program(lambda x: prints(x, **changed), X), X, match=what)


@pytest.mark.parametrize("repeated", [False, True])
def test_operands_of_effects_have_the_tolerance_of_results(repeated):
    def shown(x, small=1.0, halves=False):
        total = x[:50].sum() + x[50:].sum() if halves else x.sum()
        if repeated:
            lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("{}", x * i), c)[1], 0)
        jax.debug.print("{} {}", jnp.stack([x[0], 1e-6 * small * x[1]]), total - 4950 * x[1])
        return x

    values = jnp.sqrt(jnp.arange(100.0) ** 2 + 0.01).at[1].set(1.0)
    before = program(shown, values)
    verify(before, program(lambda x: shown(x, halves=True), values), values)
    wrong = program(lambda x: shown(x, small=2.0), values)
    refuses(before, wrong, values, match="different values: value 0 differs in 1 of 2")


def test_callbacks_must_call_the_same_function():
    def calling(factor):
        def host(v):
            return v * factor

        def f(x):
            y = io_callback(host, jax.ShapeDtypeStruct((3,), jnp.float32), x)
            return lax.scan(lambda c, _: (c + y, jax.debug.callback(host, c)), x, length=2)[0]

        return program(f, X)

    verify(calling(2), calling(2), (X,))
    verify(calling(2), calling(2).apply("unroll, inline"), (X,))
    refuses(calling(2), calling(3), X, match="io_callback .* factor = 2 against host: factor = 3")


def test_effects_in_a_shard_map_must_be_the_same():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def printing(*texts):
        def shard(x):
            for text in texts:
                jax.debug.print(text + " {}", x)
            return x

        spec = jax.sharding.PartitionSpec("i")
        return program(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec), X)

    verify(printing("a"), printing("a"), (X,))
    refuses(printing("a"), printing("b"), X, match="debug_print .* in it, .* a {} against b {}")
    refuses(printing("a"), printing("a", "b"), X, match="debug_print .* in it is added")


def test_prints_are_not_shown(capfd):
    verify(program(prints, X), program(lambda x: prints(x), X))
    assert capfd.readouterr().out == ""


def test_a_callback_with_results_is_called_once():
    calls = []

    def count(x):
        calls.append(x)
        return np.float32(len(calls))

    def f(x):
        like = jax.ShapeDtypeStruct((), jnp.float32)
        return io_callback(count, like, x, ordered=True) + io_callback(count, like, x, ordered=True)

    before = program(f, X)
    after = before.replace(jaxpr=jax.make_jaxpr(jaxpr_as_fun(before.jaxpr))(X))
    verify(before, after)
    assert len(calls) == 2


# --- --- errors -----------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_refused():
    before = program(lambda x: x, X)
    with pytest.raises(ArgumentsError, match="takes 1 arrays, not 2"):
        verify(before, before, (X, X))
    with pytest.raises(ArgumentsError, match=r"'a0' is i32\[2\], but <lambda> takes f32\[3\]"):
        verify(before, before, (jnp.arange(2),))


def test_contents_of_refs_are_compared_afterwards():
    def before(r, x):
        r[...] += x
        return r[...].sum()

    def wrong(r, x):
        r[...] += x
        result = r[...].sum()
        r[0] = 0.0
        return result

    ref = jax.new_ref(X)
    old, new = program(before, ref, X), program(wrong, ref, X)
    verify(old, old, (ref, X))
    verify(old, old.apply("-O2"), (ref, X))
    verify(old, old.apply("-O2"))
    refuses(old, new, ref, X, match=r"a0\[...\] differs in 1 of 3 elements")
    np.testing.assert_array_equal(ref[...], X)


def test_a_closed_over_ref_has_the_same_contents_for_both():
    counter = jax.new_ref(jnp.zeros(()))

    def count(x):
        counter[...] += x
        return counter[...]

    before = program(count, 1.0)
    verify(before, before.apply("-O1"), (1.0,))
    verify(before, Dce(drop_inputs=True)(before))


def test_programs_that_cannot_run_are_refused():
    free = program(lambda x: x, X).replace(axis_env=(("i", 2),))
    with pytest.raises(UnsupportedError, match="free named axes 'i'"):
        verify(free, free)


@pytest.mark.proof
def test_symbols_have_the_sizes_of_the_arguments_or_small_ones():
    n, m = jax.export.symbolic_shape("n, m", constraints=["n >= 2*m"])
    types = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (n, m)]
    before = program(lambda x, y: x.sum() + y, *types)
    right, wrong = (program(lambda x, y, f=f: f * x.sum() + y, *types) for f in (1, 2))
    verify(before, right)
    verify(before, right, (jnp.ones(4), jnp.ones(2)))
    with pytest.raises(CheckError, match="differs in 2 of 2 elements"):
        verify(before, wrong)
    with pytest.raises(CheckError, match="differs in 1 of 1 elements"):
        verify(before, wrong, (jnp.ones(4), jnp.ones(1)))
    with pytest.raises(ArgumentsError, match="n >= 2"):
        verify(before, wrong, (jnp.ones(4), jnp.ones(3)))


def test_a_program_may_have_lost_symbols_and_their_arguments():
    n, m = jax.export.symbolic_shape("n, m")
    types = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (n, m)]
    before = program(lambda x, y: x.cumsum(), *types)
    verify(before, Dce(drop_inputs=True)(before))
    verify(before, Specialize({"n": 4})(before))
    verify(before, Specialize({"n": "2*m"})(before))
    verify(before, Specialize({"n": 4, "m": 2})(before), (jnp.ones(4), jnp.ones(2)))


def test_an_error_in_the_rewritten_program_is_its_fault():
    def fails(x):
        raise ValueError("not today")

    before = program(lambda x: jax.pure_callback(lambda v: v, x, x), X)
    after = program(lambda x: jax.pure_callback(fails, x, x), X)
    refuses(before, after, X, match="can no longer be run")


@pytest.mark.proof
def test_jax_config_does_not_change_the_verdict():
    before = program(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2 + jnp.log(x - 1), x), X)
    wrong = swapped(before, "mul", "add")
    with jax.transfer_guard("disallow"), jax.debug_nans(True), jax.debug_infs(True):
        verify(before, before)
        verify(before, before, (np.arange(3.0, dtype=np.float32),))
        refuses(before, wrong, np.arange(1, 4, dtype=np.float32), match="computes something else")
