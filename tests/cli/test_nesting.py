"""Programs of many nested bodies: every command shows or runs them, or says that it cannot.

JAX traces and compiles them within Python's default recursion limit, of which passes and tables
need more for each body. `pytest -m sweep tests/cli/test_nesting.py` runs every command on every
kind of body.
"""

import runpy
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from tests.cli.platforms import lines

NESTED = """
    import jax, jaxprtool

    def jit(f): return lambda x: jax.jit(lambda y: f(y) + 1)(x)
    def remat(f): return lambda x: jax.checkpoint(lambda y: f(y) * y)(x)
    def cond(f): return lambda x: jax.lax.cond(x.sum() > 0, f, lambda y: y * 2, x)
    def loop(f): return lambda x: jax.lax.while_loop(lambda y: y.sum() < 0, lambda y: f(y) + 1, x)
    # Of one iteration: 90 nested scans of two would never end.
    def scan(f): return lambda x: jax.lax.scan(lambda c, _: (f(c), ()), x, length=1)[0]

    def custom_jvp(f):
        g = jax.custom_jvp(f)
        g.defjvp(lambda primals, tangents: (g(*primals), tangents[0] * 2))
        return g

    def custom_vjp(f):
        g = jax.custom_vjp(f)
        g.defvjp(lambda x: (g(x), x), lambda x, ct: (ct * x,))
        return g

    KINDS = [jit, remat, cond, scan, custom_jvp, custom_vjp, loop]

    def within(kinds, levels):
        f = jax.numpy.sin
        for level in range(levels):
            f = kinds[level % len(kinds)](f)
        return jaxprtool.example("f32[4]")(lambda x: f(x).sum())

    for kind in KINDS:
        globals()[f"{kind.__name__}_90"] = within([kind], 90)
    all_90, all_300 = within(KINDS, 90), within(KINDS, 300)

    @jaxprtool.example("f32[4]")
    def endless(x):
        return sorted([x], key=endless)
"""

#: Command lines for a program TARGET.
LINES = """
    show TARGET
    show TARGET -o page.html
    show TARGET --format tree
    show TARGET --format table
    source TARGET
    diff TARGET TARGET
    why TARGET x
    cost TARGET
    memory TARGET
    memory TARGET -p grad
    residuals TARGET
    report TARGET -o report.html
    outline TARGET
    lint TARGET
    opt TARGET -p -O2
    opt TARGET -p -O1 --verify
    opt TARGET -f html -o page.html
    emit TARGET --to jaxpr
    emit TARGET --to python
    emit TARGET --to hlo
    emit TARGET --to dot
    vmap TARGET --axis-size 2
    unzip TARGET --auto
    run TARGET
    nans TARGET
    watch TARGET
    compare TARGET TARGET
    precision TARGET
    determinism TARGET
    shardings TARGET --mesh x=2 --in-specs P('x')
"""


@pytest.fixture
def nested(folder):
    (folder / "nested.py").write_text(textwrap.dedent(NESTED))


@pytest.mark.parametrize("line", ["memory nested.py:jit_90", "show nested.py:all_90 -o page.html"])
def test_what_jax_traces_can_be_measured_and_shown(nested, cli, line):
    limit = sys.getrecursionlimit()
    result = cli(*line.split())
    assert result.code == 0, result.err
    assert sys.getrecursionlimit() == limit


def test_a_program_that_is_nested_too_deeply_is_one_line(cli, monkeypatch):
    def endless(*args, **kwargs):
        return endless(*args, **kwargs)

    monkeypatch.setattr("jaxprtool.commands.memory.estimate.memory", endless)
    result = cli("memory", "functions.py:wasteful")
    assert result.code == 2 and result.lines[-2:] == [
        "error: the bodies of the program are nested too deeply for this command",
        "hint: --traceback shows where",
    ]


@pytest.mark.parametrize(("setting", "limit"), [("", 1000), ("sys.setrecursionlimit(1500)", 1500)])
def test_a_users_code_has_pythons_limit_or_its_own(cli, folder, setting, limit):
    (folder / "limits.py").write_text(f"""
import sys
{setting}
imported = sys.getrecursionlimit()
def f(x): return x + imported + sys.getrecursionlimit()
""")
    result = cli("show", "limits.py:f", "--args", "0.0")
    assert result.out.count(f" {limit}.0:f32[]") == 2, result.out


def test_endless_recursion_through_c_does_not_overflow_the_stack(nested, cli):
    result = cli("show", "nested.py:endless")
    assert result.code == 3 and "RecursionError" in result.lines[-1]


KINDS = ("jit", "remat", "cond", "scan", "custom_jvp", "custom_vjp", "loop")


def is_too_deep(function):
    """Return True if JAX cannot trace a function within Python's limit."""
    try:
        jax.make_jaxpr(function)(jnp.ones(4))
    except RecursionError:
        return True
    return False


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*(f"{kind}_90" for kind in KINDS), "all_90", "all_300"])
def test_every_command_works_on_deep_programs_or_says_why_not(nested, cli, name):
    function = runpy.run_path("nested.py")[name]
    for line in lines(LINES):
        result = cli(*line.replace("TARGET", f"nested.py:{name}").split(" "))
        errors = sum(text.startswith("error: ") for text in result.lines)
        failed = errors == 1 and result.code in (2, 3)
        if result.code == 3:  # JAX itself needs more than Python's limit
            assert "RecursionError" in result.lines[-1]
            differentiates = "-p grad" in line or line.startswith("residuals")
            assert is_too_deep(jax.grad(function) if differentiates else function), line
        done = result.code in (0, 1) and not errors
        assert done or failed, (line, result.code, result.err)
