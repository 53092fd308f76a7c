"""Estimates of compile time against XLA's CPU seconds: within a factor of two, or none."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.commands.outline.compile_time import LEAST_SECONDS, compile_estimate
from jaxprtool.execute.running.backends import compiled_afresh
from tests.benchmarks.outline_models import MODELS

MATRIX, VECTOR = jnp.ones((64, 64)), jnp.ones(64)


def chain(count, *functions):
    """A chain of elementwise operations."""

    def f(x):
        for i in range(count):
            x = functions[i % len(functions)](x)
        return x

    return f, (VECTOR,)


def reused(count):
    """The gradient of a chain whose values are used twice."""

    def f(x):
        for _ in range(count):
            x = x * jnp.tanh(x) + 0.5 * x
        return x.sum()

    return jax.grad(f), (VECTOR,)


def bins(parameters, bins):
    """The gradient of a likelihood: long products, as in histogram fits (jax issue 4924)."""
    rng = np.random.RandomState(0)
    nominal = rng.rand(2, bins) + 1
    up, down = (nominal[:, None] * (1 + s * rng.rand(2, parameters, bins)) for s in (0.1, -0.1))

    def likelihood(theta):
        total = jnp.zeros(bins)
        for p in range(2):
            e = nominal[p]
            for s in range(parameters):
                n, u, d = nominal[p], up[p, s], down[p, s]
                t = theta[s]
                e = e * jnp.where(t > 0, n + t * (u - n), n + t * (n - d)) / n
            total = total + e
        return jnp.sum(total - nominal.sum(0) * jnp.log(total))

    return jax.grad(likelihood), (jnp.zeros(parameters),)


def products(count, between=1, gradient=False):
    """Products with chains of elementwise operations between them."""

    def f(x, weights):
        for w in weights:
            x = x @ w
            for _ in range(between):
                x = jnp.tanh(x)
        return (x**2).sum()

    return jax.grad(f, 1) if gradient else f, (MATRIX, [MATRIX] * count)


def convolutions(count, gradient):
    """Convolutions of images."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def f(kernels, x):
        for k in kernels:
            x = jax.nn.relu(
                lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)
            )
        return (x**2).mean()

    kernels = [jnp.ones((3, 3, 8, 8))] * count
    return jax.grad(f) if gradient else f, (kernels, jnp.ones((2, 16, 16, 8)))


def sorts(count):
    """Sorts along both axes."""

    def f(x):
        for i in range(count):
            x = jnp.sort(x * 1.5 + i, axis=i % 2)
        return x

    return f, (MATRIX,)


def recurrence(steps, gradient, as_scan):
    """A recurrent network, as a scan or unrolled."""

    def f(w, xs):
        def step(h, x):
            h = jnp.tanh(w @ h + x)
            return h, h.sum()

        if as_scan:
            return lax.scan(step, VECTOR, xs)[1].sum()
        h = VECTOR
        for t in range(steps):
            h, _ = step(h, xs[t])
        return (h**2).sum()

    return jax.grad(f) if gradient else f, (MATRIX, jnp.ones((steps, 64)))


def outer(count):
    """Outer products, which XLA fuses."""

    def f(x):
        for _ in range(count):
            x = jnp.einsum("i,j->ij", x, x).sum(0)
        return x

    return f, (VECTOR,)


def model(name, depth=None):
    case = MODELS[name].case(depth)
    return case.fun, case.args


SLOW = jnp.sin, jnp.exp, lambda x: x * 1.01, lambda x: x + 1.5
CHEAP = SLOW[2:]
COUNTS = (100, 300, 1000, 2000, 5000)

PROGRAMS = {
    **{f"chain {n}": lambda n=n: chain(n, *SLOW) for n in COUNTS},
    **{f"products and sums {n}": lambda n=n: chain(n, *CHEAP) for n in COUNTS},
    **{f"reused {n}": lambda n=n: reused(n) for n in (5, 10, 30, 100)},
    **{f"bins {n}": lambda n=n: bins(n, 12) for n in (4, 8, 12, 16, 20)},
    **{f"outer {n}": lambda n=n: outer(n) for n in (5, 20, 50)},
    **{f"sorts {n}": lambda n=n: sorts(n) for n in (3, 8, 15)},
    **{f"products {n}": lambda n=n: products(n) for n in (4, 20, 60)},
    **{f"products {n} gradient": lambda n=n: products(n, 1, True) for n in (4, 20, 60)},
    **{f"products, {n} between": lambda n=n: products(6, n) for n in (5, 15, 30)},
    **{f"gradient, {n} between": lambda n=n: products(6, n, True) for n in (5, 15)},
    **{f"convolutions {n}": lambda n=n: convolutions(n, False) for n in (3, 12, 24)},
    **{f"convolutions {n} gradient": lambda n=n: convolutions(n, True) for n in (3, 12, 24)},
    **{f"scan {n}": lambda n=n: recurrence(50, n, True) for n in (False, True)},
    **{f"steps {n}": lambda n=n: recurrence(n, False, False) for n in (10, 30, 60)},
    **{f"steps {n} gradient": lambda n=n: recurrence(n, True, False) for n in (10, 30, 60)},
    **{f"LSTM {n}": lambda n=n: model("lstm", n) for n in (10, 30)},
    **{f"experts {n}": lambda n=n: model("experts", n) for n in (2, 3, 4)},
    **{f"forward {n}": lambda n=n: model("transformer_forward", n) for n in (2, 4, 6)},
    **{f"gradient {n}": lambda n=n: model("transformer_gradient", n) for n in (2, 3, 4)},
    **{f"AdamW {n}": lambda n=n: model("transformer_adamw", n) for n in (2, 3, 4)},
    "MLP": lambda: model("mlp"),
}


#: A program whose compile time shows how fast the machine is.
REFERENCE = "gradient 2"


def measured(program):
    """Return the CPU seconds that XLA takes, the least of two times."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    found = []
    for _ in range(2):
        with compiled_afresh():
            lowered = jax.jit(program.flat_function(donate=False)).lower(*types)
            start = time.process_time()
            lowered.compile()
            found.append(time.process_time() - start)
    return min(found)


def test_there_are_sixty_programs():
    assert len(PROGRAMS) >= 60


@pytest.mark.sweep
def test_programs_of_most_kinds_of_networks_have_a_figure():
    programs = [jaxprtool.trace(fun, *args) for fun, args in (make() for make in PROGRAMS.values())]
    estimates = [compile_estimate(program).seconds for program in programs]
    assert sum(seconds is not None and seconds > LEAST_SECONDS for seconds in estimates) >= 15


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != REFERENCE])
def test_an_estimate_is_within_a_factor_of_two_or_none_is_shown(name):
    function, arguments = PROGRAMS[name]()
    program = jaxprtool.trace(function, *arguments)
    estimate = compile_estimate(program).seconds
    if estimate is None or estimate <= LEAST_SECONDS:
        pytest.skip("no figure is shown")
    # The seconds are those of one machine: a program measured at the same time tells the speed.
    function, arguments = PROGRAMS[REFERENCE]()
    reference = jaxprtool.trace(function, *arguments)
    speed = measured(reference) / compile_estimate(reference).seconds
    ratio = estimate * speed / measured(program)
    assert 0.5 <= ratio <= 2
