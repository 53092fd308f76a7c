"""Programs with Equinox's and Lineax's primitives: without checks, in files and back, as Python."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jaxprtool_equinox import modules

import jaxprtool
from jaxprtool.errors import ProgramFileError, UnsupportedError
from jaxprtool.ir import rules
from jaxprtool.ir.regions import sub_jaxprs

X = jnp.arange(1.0, 4.0)
MATRIX = jnp.array([[3.0, 1.0], [1.0, 2.0]])


def names(jaxpr):
    """The primitives of all equations, at every depth."""
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
        for _, body in sub_jaxprs(eqn):
            found |= names(body)
    return found


def checked(x):
    return jnp.sqrt(eqx.error_if(x, x < 0, "negative"))


def reductions(x):
    some, all_, most = eqxi.unvmap_any(x > 1), eqxi.unvmap_all(x > 1), eqxi.unvmap_max(x)
    x = eqxi.nonbatchable(x, name="reductions", allow_constant_across_batch=True)
    x = eqxi.nontraceable(eqxi.nondifferentiable_backward(x, name="reductions"), name="x")
    return jnp.where(some & ~all_, x, most)


def loop(x):
    def body(carry):
        step, value = carry
        return step + 1, jnp.sin(value)

    last = eqxi.while_loop(lambda c: c[0] < 3, body, (0, x), kind="bounded", max_steps=4)[1]
    return last.sum()


def solve(a, b):
    return lx.linear_solve(lx.MatrixLinearOperator(a), b, throw=False).value


def conjugate(a, b):
    operator = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, b, lx.CG(rtol=1e-6, atol=1e-6), throw=False).value


def of_function(a, b):
    operator = lx.JacobianLinearOperator(lambda x, _: a @ x, b, tags=())
    return lx.linear_solve(operator, b, throw=False).value


def slope(a, b):
    return jax.grad(lambda a: solve(a, b).sum())(a)


PROGRAMS = {
    "checked": (checked, X),
    "reductions": (reductions, X),
    "a loop": (loop, X),
    "a loop's gradient": (jax.grad(loop), X),
    "a loop of lanes": (jax.vmap(loop), jnp.ones((2, 3))),
    "a solve": (solve, MATRIX, X[:2]),
    "a solve's gradient": (slope, MATRIX, X[:2]),
    "a solve of lanes": (jax.vmap(solve, (None, 0)), MATRIX, jnp.eye(2)),
    "conjugate gradients": (conjugate, MATRIX, X[:2]),
    "a Jacobian": (of_function, MATRIX, X[:2]),
}


def without_checks(name):
    fun, *args = PROGRAMS[name]
    return jaxprtool.trace(fun, *args).apply("drop_checks"), args, fun(*args)


#: What takes longer to trace and compile.
LONG = ("a loop's gradient", "a solve's gradient", "a solve of lanes", "a Jacobian")


@pytest.mark.parametrize(
    "name", [pytest.param(p, marks=pytest.mark.sweep if p in LONG else ()) for p in PROGRAMS]
)
def test_files_and_source_hold_the_same_program(name, tmp_path):
    program, args, expected = without_checks(name)
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    again = jaxprtool.read(tmp_path / "p.jaxpr")
    assert jaxprtool.equivalent(program, again)
    np.testing.assert_allclose(again(*args), expected, rtol=1e-6)
    namespace = {}
    exec(jaxprtool.to_python(program), namespace)
    np.testing.assert_allclose(namespace[program.name](*args), expected, rtol=1e-6)


def test_nothing_is_left_of_error_if():
    program, _, _ = without_checks("checked")
    assert names(program.jaxpr) == {"sqrt"}
    mapped = jaxprtool.trace(jax.vmap(checked), jnp.ones((2, 3))).apply("drop_checks")
    assert names(mapped.jaxpr) == {"sqrt"}
    slope = jaxprtool.trace(jax.grad(lambda x: checked(x).sum()), X).apply("drop_checks")
    assert not names(slope.jaxpr) & {"pure_callback", "unvmap_any", "cond"}


def test_checks_that_stay_are_written_as_stubs(tmp_path):
    program = jaxprtool.trace(checked, X)
    with pytest.raises(UnsupportedError) as caught:
        jaxprtool.write(program, tmp_path / "p.jaxpr")
    assert "pure_callback" in str(caught.value) and "drop_checks" in str(caught.value.hint)
    jaxprtool.write(program, tmp_path / "p.jaxpr", callbacks="stub")
    again = jaxprtool.read(tmp_path / "p.jaxpr")
    np.testing.assert_array_equal(again(X), jnp.sqrt(X))
    with pytest.raises((RuntimeError, ValueError), match="was omitted"):
        jax.block_until_ready(again(-X))
    assert names(again.apply("drop_checks").jaxpr) == {"sqrt"}


@pytest.mark.sweep
def test_gradients_of_a_program_from_a_file_are_those_of_the_function(tmp_path):
    program, (a, b), _ = without_checks("conjugate gradients")
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    again = jaxprtool.read(tmp_path / "p.jaxpr")
    expected = jax.grad(lambda b: conjugate(a, b).sum())(b)
    np.testing.assert_allclose(jax.grad(lambda b: again(a, b).sum())(b), expected, rtol=1e-5)


def test_a_function_of_the_users_is_refused(tmp_path):
    def norm(x):
        return jnp.abs(x).max()

    def f(a, b):
        operator = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
        return lx.linear_solve(operator, b, lx.CG(1e-6, 1e-6, norm=norm)).value

    program = jaxprtool.trace(f, MATRIX, X[:2])
    with pytest.raises(UnsupportedError, match=r"linear_solve at .* a Python function \(.*norm"):
        jaxprtool.write(program, tmp_path / "p.jaxpr")
    with pytest.raises(UnsupportedError, match=r"linear_solve at .* cannot be written as Python"):
        jaxprtool.to_python(program)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Module('os.environ')", "'os.environ' is not a class of equinox"),
        ("Module('equinox.Nothing')", "equinox has no class 'equinox.Nothing'"),
        ("Module('lineax._solver.cg.CG', wrong=1)", "has no field 'wrong'"),
        ("function('os.system')", "'os.system' is not one of the norms"),
    ],
)
def test_a_file_can_name_nothing_else(text, fault, tmp_path):
    program, _, _ = without_checks("a solve")
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program, path)
    written = path.read_text()
    start = written.index("args=(") + len("args=(")
    path.write_text(f"{written[:start]}{text}, {written[start:]}")
    with pytest.raises(ProgramFileError, match=fault):
        jaxprtool.read(path)


def test_without_the_plugin_one_line_names_it(tmp_path, monkeypatch):
    program, _, _ = without_checks("reductions")
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    text = (tmp_path / "p.jaxpr").read_text().replace("unvmap_max", "unvmap_min")
    (tmp_path / "p.jaxpr").write_text(text)
    monkeypatch.setattr(rules, "_installed", dict)
    monkeypatch.setattr(rules, "_KNOWN", {"jaxprtool-equinox": ("unvmap_min",)})
    with pytest.raises(ProgramFileError, match="unknown primitive 'unvmap_min'") as caught:
        jaxprtool.read(tmp_path / "p.jaxpr")
    assert caught.value.hint is not None and "jaxprtool-equinox" in caught.value.hint


def test_modules_are_made_without_running_their_code():
    made = modules.module("lineax._operator.MatrixLinearOperator", matrix=MATRIX, tags=frozenset())
    assert isinstance(made, lx.MatrixLinearOperator)


def test_what_they_cost_is_known():
    def body(carry):
        step, out = carry
        return step + 1, out.at[step].set(out[step] * 2)

    def loop(x):
        carry = jnp.int32(0), x
        return eqxi.while_loop(lambda c: c[0] < 3, body, carry, kind="checkpointed", max_steps=4)[1]

    for fun in (reductions, loop, jax.grad(lambda x: loop(x).sum())):
        assert jaxprtool.cost(jaxprtool.trace(fun, X)).unknown == {}, fun
    found = jaxprtool.cost(jaxprtool.trace(reductions, X), "primitive").groups
    assert {g.name: g.work.flops for g in found if g.name.startswith("unvmap")} == {
        "unvmap_any": 2,
        "unvmap_all": 2,
        "unvmap_max": 2,
    }
