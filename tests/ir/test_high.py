"""Operations with their own rules, such as `jnp.frexp` and `custom_root` on JAX 0.12.

On older JAX, the same functions are made of ordinary equations, with the same results. The forward
rules of a `custom_vjp` with `optimize_remat` hold live objects on each release.
"""

import functools

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import trace
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.jaxpr.write import program_file_text

X = jnp.array([3.0, -1.5, 0.25, 8.0])
SORTED = jnp.array([0.0, 1.0, 2.0, 4.0])


def root(a):
    """Return the square root, by Newton's method."""

    def newton(f, y):
        return lax.fori_loop(0, 9, lambda _, y: y - (y * y - a) / (2 * y), y)

    return lax.custom_root(lambda y: y * y - a, a, newton, lambda g, y: y / g(1.0))


def root_with_steps(a):
    def newton(f, y):
        return lax.fori_loop(0, 9, lambda _, y: y - (y * y - a) / (2 * y), y), a + 1

    return lax.custom_root(lambda y: y * y - a, a, newton, lambda g, y: y / g(1.0), has_aux=True)


FUNCTIONS = {
    "custom_root": (root, jnp.float32(2)),
}
SWEPT = {
    "frexp": (jnp.frexp, X),
    "custom_root_with_aux": (root_with_steps, jnp.float32(2)),
    "ldexp": (lambda x: jnp.ldexp(x, jnp.arange(4)), X),
    "nonzero": (lambda x: x[jnp.nonzero(x > 0, size=3)[0]], X),
    "searchsorted": (lambda x: (jnp.searchsorted(SORTED, x), x * x), X),
    "argwhere": (lambda x: (jnp.argwhere(x > 0, size=3), x), X),
    "flatnonzero": (lambda x: (jnp.flatnonzero(x > 0, size=3, fill_value=-1), x), X),
    "digitize": (lambda x: (jnp.digitize(x, SORTED), x), X),
    "histogram2d": (lambda x: jnp.histogram2d(x, x * 2, bins=3)[0], X),
    "insert": (lambda x: jnp.insert(x, jnp.array([1, 2]), 5.0), X),
    "place": (lambda x: jnp.place(x, x > 0, jnp.array([7.0, 8.0]), inplace=False), X),
    "sorting": (lambda x: (jnp.searchsorted(SORTED, x, side="right", method="sort"), x), X),
    "unique": (lambda x: jnp.unique(x, size=4), X),
    "mode": (lambda x: jsp.stats.mode(x)[0], X),
    "expm": (lambda x: jsp.linalg.expm(x), jnp.array([[4.0, 1.0], [1.0, 3.0]])),
    "histogram": (lambda x: (jnp.histogram(x, bins=3)[0], x), X),
    "choice": (lambda x: (jax.random.choice(jax.random.key(0), 4, (3,), p=abs(x)), x), X),
}


def close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def total(fun):
    """Return a scalar function whose gradient depends on every result of `fun`."""

    def scalar(x):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(fun(x)))

    return scalar


def in_file(program, tmp_path):
    jaxprtool.write(program, tmp_path / "program.jaxpr")
    return jaxprtool.read(tmp_path / "program.jaxpr")


def as_python(program):
    made: dict = {}
    exec(compile(jaxprtool.to_python(program), "made", "exec"), made)
    return made[program.name]


def check(fun, x, tmp_path):
    batch = jnp.stack([x, 1.5 * x])
    expected, mapped, slope = fun(x), jax.vmap(fun)(batch), jax.grad(total(fun))(x)
    close(jaxprtool.jit(fun)(x), expected)
    close(jax.jit(jaxprtool.vmap(fun))(batch), mapped)
    close(jax.grad(total(jaxprtool.jit(fun)))(x), slope)
    program = trace(fun, x).replace(name="fun")
    close(trace(total(fun), x).apply("grad, -O2")(x), slope)
    close(program.apply("batch(axis_size=2), -O1")(batch), mapped)
    read = in_file(program, tmp_path)
    assert jaxprtool.equivalent(read, program)
    python = as_python(program)
    for again in (read, python):
        close(again(x), expected)
        close(jax.vmap(again)(batch), mapped)
        close(jax.grad(total(again))(x), slope)


@pytest.mark.proof
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_equal_jaxs_under_every_transformation_and_in_every_format(name, tmp_path):
    check(*FUNCTIONS[name], tmp_path)


def test_operations_are_compiled():
    close(jaxprtool.jit(jnp.frexp)(X), jnp.frexp(X))


@pytest.mark.sweep
def test_all_operations_are_lowered():
    def fun(x, a, m):
        return {
            name: each(m if x0.ndim == 2 else x if x0.ndim else a)
            for name, (each, x0) in (FUNCTIONS | SWEPT).items()
        }

    ours, theirs = (
        jit(fun).lower(X, jnp.float32(2), SWEPT["expm"][1]) for jit in (jaxprtool.jit, jax.jit)
    )
    assert ours.out_tree == theirs.out_tree


@pytest.mark.sweep
@pytest.mark.parametrize("name", SWEPT)
def test_nested_and_third_party_operations_are_supported(name, tmp_path):
    check(*SWEPT[name], tmp_path)


# --- JAX's own custom derivatives and remat, as operations ----------------------------------------


@jax.custom_jvp
def tripled(x):
    return x * 1.0


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@pytest.fixture
def new_kinds():
    names = ("jax_custom_jvp3", "jax_custom_vjp3", "jax_remat3")
    if not hasattr(jax.config, names[0]):
        pytest.skip("JAX has these since 0.12")
    for name in names:
        jax.config.update(name, True)
    yield
    for name in names:
        jax.config.update(name, False)


@pytest.mark.parametrize("name", ["frexp", "nonzero", "searchsorted", "sorting", "digitize"])
def test_python_traces_to_an_equivalent_program(name):
    fun, x = SWEPT[name]
    program = trace(lambda x: fun(x), x).replace(name="fun")
    assert jaxprtool.equivalent(trace(as_python(program), x), program)


def test_the_new_remat_and_custom_derivatives_keep_their_rules(new_kinds, tmp_path):
    def fun(x):
        return jax.checkpoint(lambda x: jnp.sin(doubled(tripled(x))))(x)

    slope = jax.grad(total(fun))(X)
    program = trace(fun, X)
    read = in_file(program, tmp_path)
    close(trace(total(fun), X).apply("-O2, grad")(X), slope)
    close(jax.grad(total(jaxprtool.jit(fun)))(X), slope)
    close(jax.grad(total(read))(X), slope)
    close(jax.grad(total(as_python(program)))(X), slope)


# --- forward rules that JAX replaces where no residual is used ------------------------------------


@jax.custom_vjp
def optimized(x):
    return jnp.sin(x)


def _optimized_fwd(x):
    return optimized(x), (x, jnp.cos(x))


def _optimized_bwd(residuals, g):
    x, cosine = residuals
    return (g * (cosine + 0 * x),)


optimized.defvjp(_optimized_fwd, _optimized_bwd, optimize_remat=True)


def optimized_slope(x):
    return jax.grad(total(lambda x: optimized(2 * x)))(x)


@pytest.mark.proof
def test_an_optimized_forward_rule_is_in_files_and_python(tmp_path):
    program = trace(optimized_slope, X).replace(name="fun")
    read, python = in_file(program, tmp_path), as_python(program)
    assert "remat_opt" in str(program) and "remat_opt" not in str(read)
    assert jaxprtool.equivalent(read, program)
    batch = jnp.stack([X, 1.5 * X])
    for again in (program, program.apply("-O2"), read, python):
        close(again(X), optimized_slope(X))
        close(jax.vmap(again)(batch), jax.vmap(optimized_slope)(batch))
    close(program.apply("batch(axis_size=2)")(batch), jax.vmap(optimized_slope)(batch))


def test_an_optimized_forward_rule_without_readers_is_the_function():
    program = trace(lambda x: jax.vjp(optimized, x)[0], X)
    assert "remat_opt" not in str(program.apply("dce"))


def test_optimized_forward_rules_are_equal_if_the_rules_and_the_functions_are():
    def slope_of(make):
        def slope(x):
            function = jax.custom_vjp(make(x))
            function.defvjp(_optimized_fwd, _optimized_bwd, optimize_remat=True)
            return jax.grad(total(lambda x: function(2 * x)))(x)

        return trace(slope, X)

    weights = [jnp.arange(4.0), jnp.ones(4)]
    makes = [lambda _: jnp.sin, lambda _: jnp.cos]
    makes += [lambda _, w=w: lambda x: x * w for w in weights]
    makes.append(lambda traced: lambda x: x * traced)
    programs = [slope_of(make) for make in makes]
    for i, program in enumerate(programs):
        equal = [jaxprtool.equivalent(other, program) for other in programs]
        assert equal == [i == j for j in range(len(programs))]
    assert [jaxprtool.equivalent(slope_of(m), p) for m, p in zip(makes, programs, strict=True)] == [
        *(True, True, True, True),
        False,  # of the other trace's own value, which may not be compared
    ]


def test_endlessly_nested_rules_are_refused(new_kinds):
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(n, x):
        return jnp.sin(x * (n % 97))

    @function.defjvp
    def rule(n, primals, tangents):
        (x,), (t,) = primals, tangents
        return function(n, x), (function(2 * n, x) + function(2 * n + 1, x)) * t

    program = trace(functools.partial(function, 1), jnp.float32(1.0))
    with pytest.raises(UnsupportedError, match=r"test_high\.py.*never end"):
        program_file_text(program)
