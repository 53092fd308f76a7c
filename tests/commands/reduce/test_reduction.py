"""`reduce` makes a program smaller while a predicate holds."""

import os
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.commands.reduce import checks
from jaxprtool.commands.reduce.reduction import CallingOracle, ReductionSearch, ReductionState
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.jaxcompat import open_jaxpr


def primitives(program):
    return [eqn.primitive.name for eqn in equations(open_jaxpr(program.jaxpr))]


def holds(name):
    """Return a predicate that finds this primitive at any depth, and type-checks programs."""

    def predicate(program):
        type_check(program)
        return name in primitives(program)

    return predicate


def chain(x, w):
    for _ in range(60):
        x = jnp.tanh(x @ w) + 1.0
    x = jnp.where(x > 0, jnp.exp(x), jnp.sort(x))
    for _ in range(60):
        x = jnp.sin(x) * 2.0
    return x, x.sum(), w.sum()


def test_one_equation_of_hundreds_is_found_in_tens_of_tries():
    program = jaxprtool.trace(chain, jnp.ones((8, 8)), jnp.ones((8, 8)))
    found = jaxprtool.reduce(program, holds("sort"))
    assert primitives(found.program) == ["sort"] and found.equations_before > 300
    assert found.tries < 80 and found.equations_after == 1 and found.is_smaller and found.holds
    assert found.program.in_avals[0].shape in [(1, 1), (1, 2), (2, 1), (2, 2)]
    jax.block_until_ready(found.program(jnp.ones(found.program.in_avals[0].shape)))


def body(x, w):
    def layer(x, w):
        y = jnp.tanh(x * w)
        y = lax.cond(y.sum() > 0, lambda y: jnp.cumsum(y), lambda y: jnp.cos(y), y)
        return y, y.max()

    x, ys = lax.scan(layer, x, w)
    return lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.exp(x) + 1, x), ys


@pytest.mark.parametrize("name", ["cumsum", "cos", "exp", "reduce_max"])
def test_bodies_are_inlined(name):
    program = jaxprtool.trace(jax.jit(body), jnp.ones(4), jnp.ones((6, 4)))
    found = jaxprtool.reduce(program, holds(name))
    assert primitives(found.program) == [name]


def test_a_necessary_loop_becomes_short_and_loses_unnecessary_parts():
    def both(program):
        scans = [e for e in open_jaxpr(program.jaxpr).eqns if e.primitive.name == "scan"]
        return any("tanh" in map(str, (e.primitive for e in s.params["jaxpr"].eqns)) for s in scans)

    program = jaxprtool.trace(body, jnp.ones(4), jnp.ones((6, 4)))
    found = jaxprtool.reduce(program, both)
    assert sorted(primitives(found.program)) == ["scan", "tanh"]
    (eqn,) = open_jaxpr(found.program.jaxpr).eqns
    assert eqn.params["length"] == 1


def test_the_result_is_minimal_in_constants_dtypes_and_options():
    def fun(x):
        y = lax.dot_general(x, x, (((1,), (0,)), ((), ())), precision="highest")
        return lax.pow(y * 3.0, jnp.bfloat16(7.0)) + jnp.arange(9.0, dtype=x.dtype).reshape(3, 3)

    program = jaxprtool.trace(fun, jnp.ones((3, 3), jnp.bfloat16))
    found = jaxprtool.reduce(program, lambda p: {"dot_general", "pow"} <= {*primitives(p)})
    assert sorted(primitives(found.program)) == ["dot_general", "pow"]
    assert found.program.in_avals[0].dtype == jnp.float32
    dot = next(e for e in found.program.jaxpr.eqns if e.primitive.name == "dot_general")
    assert dot.params["precision"] is None


def test_a_remaining_call_has_no_options_and_can_be_written(tmp_path):
    step = jax.jit(lambda x, y: (x + y, y), donate_argnums=0, keep_unused=True)
    program = jaxprtool.trace(lambda x: step(x, x * 2), jnp.ones(4))
    found = jaxprtool.reduce(
        program, lambda p: any(e.params.get("keep_unused") for e in p.jaxpr.eqns)
    )
    (call,) = found.program.jaxpr.eqns
    assert call.params["keep_unused"] and not any(call.params["donated_invars"])
    jaxprtool.write(found.program, tmp_path / "call.jaxpr")
    assert jaxprtool.equivalent(jaxprtool.read(tmp_path / "call.jaxpr"), found.program)
    assert "keep_unused=True" in jaxprtool.to_python(found.program)


def test_a_predicate_that_is_false_for_the_program_is_refused():
    program = jaxprtool.trace(jnp.sin, 1.0)
    with pytest.raises(ArgumentsError, match="False for the original program"):
        jaxprtool.reduce(program, holds("cos"))
    answers = iter([True, False])
    with pytest.raises(ArgumentsError, match="not deterministic"):
        jaxprtool.reduce(program, lambda program: next(answers))


def test_ctrl_c_returns_the_smallest_program_so_far():
    calls = []

    def predicate(program):
        calls.append(program)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return "sort" in primitives(program)

    found = jaxprtool.reduce(jaxprtool.trace(chain, jnp.ones((8, 8)), jnp.ones((8, 8))), predicate)
    assert found.interrupted and 1 < found.equations_after < found.equations_before
    assert "sort" in primitives(found.program)


def test_values_made_up_by_a_check_become_zeros_or_ones():
    class WithoutZeros(CallingOracle):
        makes_values = True

        def first(self, states):
            return super().first(s for s in states if all(v.all() for v in s.values.values()))

    program = jaxprtool.trace(lambda x: jnp.sort(x) + 1.0, jnp.ones((2, 3)))
    search = ReductionSearch(WithoutZeros(holds("sort")), lambda state, doing: None)
    found = search.run(ReductionState(program))
    (value,) = found.values.values()
    assert primitives(found.program) == ["sort"] and (value == 1.0).all()


# --- checks in separate processes -----------------------------------------------------------------


def normed(ws, x):
    def layer(x, w):
        x = jnp.log(jax.nn.relu(jnp.tanh(x @ w))) * w.sum()
        return x / jnp.sqrt((x * x).sum()), x.sum()

    x, sums = lax.scan(layer, jnp.sin(x) + 1.0, ws)
    return x.mean() + sums.sum()


@pytest.mark.sweep
def test_the_equation_that_makes_a_nan_in_a_loop_of_a_gradient_is_left():
    arguments = jnp.ones((4, 3, 3)).at[2].set(-1.0), jnp.ones((2, 3))
    program = jaxprtool.trace(jax.grad(normed), *arguments)
    values = dict(zip(program.arg_names, arguments, strict=True))
    found = jaxprtool.reduce(program, "nan", values=values)
    assert found.equations_after <= 3 < 40 < found.equations_before and found.holds
    flat = [found.values[name] for name in found.program.arg_names]
    assert any(bool(jnp.isnan(out).any()) for out in found.program(*flat))
    assert all(bool(jnp.isfinite(value).all()) for value in flat)


def test_the_equation_that_makes_a_nan_is_tried_on_its_own_first(monkeypatch):
    """From a loop in a call in a loop, at once: inlining these takes many tries."""

    @jax.jit
    def falling(x):
        return lax.while_loop(lambda x: x.sum() > -9, lambda x: x - jnp.sqrt(x), x)

    def fun(x):
        return lax.fori_loop(0, 3, lambda i, x: falling(jnp.cos(x)), x).sum()

    monkeypatch.setattr(checks, "keep_kernels", lambda: None)
    check, x = checks.parse_check("nan"), jnp.array([0.5, 0.01])
    program = jaxprtool.trace(fun, x)
    seen = check.evidence(program, {"x": x})
    text, values = check.guess(program, {"x": x})
    alone = parse_program(text, "alone")
    assert [eqn.primitive.name for eqn in alone.jaxpr.eqns] == ["sqrt"]
    assert check.same(check.evidence(alone, values), seen)


def test_the_infinities_that_lead_to_a_nan_are_reproduced(monkeypatch):
    def fun(x, start):
        return lax.scan(lambda carry, row: (carry * jnp.log(row), row), start, x)[0]

    monkeypatch.setattr(checks, "keep_kernels", lambda: None)
    check, arguments = (
        checks.parse_check("nan"),
        {"x": jnp.array([2.0, 0.0]), "start": jnp.zeros(())},
    )
    program = jaxprtool.trace(fun, *arguments.values())
    text, values = check.guess(program, arguments)
    alone = parse_program(text, "alone")
    assert [eqn.primitive.name for eqn in alone.jaxpr.eqns] == ["log", "mul"]
    assert check.evidence(alone, values) == check.evidence(program, arguments)


def refused(value):
    raise ValueError("not finite")


def test_a_nan_that_leads_to_an_error_is_found(monkeypatch):
    def function(x):
        y = jnp.sqrt(jnp.sin(x) - 2.0)
        wrong = jnp.isnan(y).any()
        return jax.lax.cond(wrong, lambda: jax.pure_callback(refused, jax.typeof(y), 0), lambda: y)

    monkeypatch.setattr(checks, "keep_kernels", lambda: None)
    program = jaxprtool.trace(function, jnp.ones(3))
    (made,) = checks.parse_check("nan").evidence(program, {"x": jnp.ones(3)})
    assert made.startswith("sqrt ")


def test_a_nan_is_found_besides_a_constant_one_and_from_finite_arguments_only(monkeypatch):
    def fun(x):
        return jnp.nanmean(jnp.where(x > 0, x, jnp.nan)) + jnp.sqrt(-x).sum()

    monkeypatch.setattr(checks, "keep_kernels", lambda: None)
    program = jaxprtool.trace(fun, jnp.ones(3))
    (name,) = program.arg_names
    (made,) = checks.parse_check("nan").evidence(program, {name: jnp.ones(3)})
    assert made.startswith("sqrt ")
    with pytest.raises(ArgumentsError, match="argument 'x' is not finite"):
        checks.parse_check("nan").evidence(program, {name: jnp.full(3, jnp.nan)})


def test_a_mismatch_is_a_difference_that_rounding_does_not_explain(monkeypatch):
    numbers = np.random.default_rng(0).standard_normal(99).astype(np.float32)
    x = jnp.concatenate([numbers, -numbers])  # the sum is one of rounding errors

    def programs(sum_of, factor):
        return jaxprtool.trace(lambda x: (sum_of(x), jnp.array([1, factor * 1e-9]) * x[0]), x)

    def mismatch(other):
        monkeypatch.setattr(checks.MismatchCheck, "pair", lambda self, program: (program, other))
        return checks.parse_check("mismatch -p dce").evidence(before, {before.arg_names[0]: x})

    monkeypatch.setattr(checks, "keep_kernels", lambda: None)
    before = programs(jnp.sum, 1)
    assert mismatch(programs(lambda x: jnp.cumsum(x)[-1], 1)) is None
    assert mismatch(programs(jnp.sum, 100)) == "result[1] differs in 1 of 2 elements"


def test_the_first_guess_of_a_mismatch_is_what_the_passes_rewrite(monkeypatch):
    def program(divide):
        def step(x, y):
            return divide(jnp.sin(x), y), x

        return jaxprtool.trace(
            lambda x, ys: jax.lax.scan(step, jnp.cos(x), ys), x, jnp.ones((3, 2))
        )

    x = jnp.array([0.1, 0.2], np.float32)
    right, wrong = program(jnp.divide), program(lambda x, y: x / (y + 1.0))
    monkeypatch.setattr(checks, "keep_kernels", lambda: None)
    monkeypatch.setattr(checks.MismatchCheck, "pair", lambda self, program: (program, wrong))
    text, values = checks.parse_check("mismatch -p dce").guess(right, {"x": x})
    guess = checks.parse_program(text, "a guess")
    assert [eqn.primitive.name for eqn in guess.jaxpr.eqns] == ["div"]
    np.testing.assert_array_equal(values[guess.arg_names[0]], jnp.sin(jnp.cos(x)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "check, fault",
    [
        (
            "mkdir seen && test -f {}",
            "not deterministic: it did not hold for the original program the second",
        ),
        ("mismatch -p dce", "not hold for the original program: its results agree"),
        ("nan", "not hold for the original program: no equation makes a NaN"),
    ],
)
def test_a_check_that_does_not_hold_is_refused_with_its_message(check, fault, folder):
    with pytest.raises(ArgumentsError, match=fault):
        jaxprtool.reduce(jaxprtool.trace(jnp.sin, 1.0), check)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "check, usage",
    [
        ("timeout", "timeout SECONDS"),
        ("timeout soon", "timeout SECONDS"),
        ("nan 3", "write the check as: nan"),
        ("mismatch", "mismatch -p PIPELINE"),
        ("mismatch --backends cpu", "mismatch -p PIPELINE"),
        ("crash --now", "write the check as: crash"),
        ("crush", "'crush' has no {} for the program's file"),
        ("error 'open", "cannot be read"),
    ],
)
def test_an_invalid_check_is_reported_with_the_syntax(check, usage):
    with pytest.raises(ArgumentsError, match=usage):
        checks.parse_check(check)


@pytest.mark.usefixtures("processes")
def test_the_death_of_the_search_is_reported_with_its_signal(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, signal; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="reduction failed: SIGSEGV"):
        jaxprtool.reduce(jaxprtool.trace(jnp.sin, 1.0), "crash")


@pytest.mark.usefixtures("processes")
def test_the_search_ends_with_its_parent(tmp_path):
    # A try sleeps. The parent of the search is killed. No process must be left.
    code = """
        import sys, jax.numpy as jnp, jaxprtool
        program = jaxprtool.trace(jnp.sin, 1.0)
        jaxprtool.reduce(program, f"echo $$ >> {sys.argv[1]}; sleep 300; test -f {{}}")
    """
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(pids)])
    wait_for(lambda: pids.exists() and pids.read_text())
    parent.kill()
    parent.wait()
    (pid,) = map(int, pids.read_text().split())
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_cause_at_the_end_of_xlas_message_is_not_truncated():
    message = checks.described(RuntimeError("INTERNAL: " + "Error dispatching: " * 40 + "no BF16"))
    assert message == "RuntimeError: INTERNAL: Error dispatching: no BF16"


def test_a_single_result_stays_single_and_a_check_may_need_the_original_structure():
    def needs(structure):
        return lambda program: str(program.out_tree) == structure and holds("sort")(program)

    program = jaxprtool.trace(lambda x: jnp.sin(jnp.sort(jnp.cos(x))), jnp.ones(3))
    found = jaxprtool.reduce(program, needs("PyTreeDef(*)"))
    assert primitives(found.program) == ["sort"]
    program = jaxprtool.trace(lambda x: {"a": jnp.sort(jnp.cos(x))}, jnp.ones(3))
    found = jaxprtool.reduce(program, needs("PyTreeDef({'a': *})"))
    assert not found.is_smaller and found.holds and found.program.out_tree == program.out_tree
