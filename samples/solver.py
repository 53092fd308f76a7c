"""Iterative solvers: loops that end on convergence, and gradients through them.

JAX cannot differentiate a `while_loop` in reverse, because the number of residuals is unknown. Both
solvers here get their gradients from the equation that they solve (implicit differentiation), with
`custom_root` and `custom_linear_solve`. The listings show the condition of the loop, and the
batched loop of `orbit`, which runs until all examples have converged.

    jaxprtool show samples/solver.py:kepler --source
    jaxprtool show samples/solver.py:grad_ridge --depth 1
    jaxprtool run  samples/solver.py:orbit
"""

import jax
import jax.numpy as jnp
from jax import lax

import jaxprtool


def newton(function, start, tolerance=1e-6, most=50):
    """A root of `function`, by Newton's method from `start`."""

    def improves(state):
        _, change, steps = state
        return (jnp.abs(change) > tolerance) & (steps < most)

    def step(state):
        x, _, steps = state
        value, slope = jax.jvp(function, (x,), (jnp.ones_like(x),))
        return x - value / slope, value / slope, steps + 1

    root, _, _ = lax.while_loop(improves, step, (start, jnp.full_like(start, jnp.inf), 0))
    return root


@jaxprtool.example("f32[]", 0.5)
def kepler(mean_anomaly, eccentricity):
    """Kepler's equation: the angle E on an ellipse with E - e sin E = M, for e below 1."""

    def excess(angle):
        return angle - eccentricity * jnp.sin(angle) - mean_anomaly

    def tangent_solve(linear, y):
        return y / linear(jnp.ones_like(y))

    return lax.custom_root(excess, mean_anomaly, newton, tangent_solve)


@jaxprtool.example("f32[]", 0.5)
def grad_kepler(mean_anomaly, eccentricity):
    """The derivatives of the angle with respect to mean anomaly and eccentricity."""
    return jax.grad(kepler, argnums=(0, 1))(mean_anomaly, eccentricity)


@jaxprtool.example("f32[8]")
def orbit(times):
    """Points of an orbit: a batched Newton iteration, which runs until all have converged."""
    angle = jax.vmap(lambda time: kepler(time, 0.5))(times)
    return jnp.stack([jnp.cos(angle) - 0.5, jnp.sqrt(0.75) * jnp.sin(angle)], axis=-1)


def conjugate_gradient(matvec, b, tolerance=1e-6):
    """The x with matvec(x) = b, for a symmetric positive definite matvec."""

    def unfinished(state):
        *_, square, steps = state
        return (square > tolerance**2 * (b @ b)) & (steps < 2 * b.size)

    def step(state):
        x, residual, direction, square, steps = state
        image = matvec(direction)
        length = square / (direction @ image)
        residual = residual - length * image
        last, square = square, residual @ residual
        return (
            x + length * direction,
            residual,
            residual + square / last * direction,
            square,
            steps + 1,
        )

    x, *_ = lax.while_loop(unfinished, step, (jnp.zeros_like(b), b, b, b @ b, 0))
    return x


@jaxprtool.example("f32[12,6]", "f32[12]")
def ridge(inputs, targets):
    """The weights of a ridge regression, by conjugate gradients, without inverting a matrix."""

    def matvec(weights):
        return inputs.T @ (inputs @ weights) + weights

    return lax.custom_linear_solve(matvec, inputs.T @ targets, conjugate_gradient, symmetric=True)


@jaxprtool.example("f32[12,6]", "f32[12]")
def grad_ridge(inputs, targets):
    """The gradient of the fit's error: one more linear solve, with the same matvec."""

    def error(inputs):
        return jnp.square(inputs @ ridge(inputs, targets) - targets).mean()

    return jax.grad(error)(inputs)


@jaxprtool.example("f32[6,6]")
def largest_singular_value(matrix):
    """Power iteration: a `fori_loop` with a fixed number of steps becomes a scan."""

    def step(_, v):
        v = matrix.T @ (matrix @ v)
        return v / jnp.linalg.norm(v)

    v = lax.fori_loop(0, 100, step, jnp.ones(matrix.shape[1]))
    return jnp.linalg.norm(matrix @ v)
