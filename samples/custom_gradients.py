"""Functions with custom derivatives: `custom_jvp` and `custom_vjp`.

The call of such a function has the function's jaxpr, and a rule that is still a Python function.
Differentiation traces the rule to equations. So `grad_loss` has the equations of both rules, and no
custom calls.

    jaxprtool show samples/custom_gradients.py:loss
    jaxprtool show samples/custom_gradients.py:grad_loss --scopes
    jaxprtool opt  samples/custom_gradients.py:loss -p dce
"""

from functools import partial

import jax
import jax.numpy as jnp

import jaxprtool


@jaxprtool.example("f32[8]")
@jax.custom_jvp
def log1pexp(x):
    """log(1 + exp(x)), whose derivative without a custom rule is inf / inf for large x."""
    return jnp.logaddexp(x, 0.0)


@log1pexp.defjvp
def log1pexp_jvp(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return log1pexp(x), jax.nn.sigmoid(x) * x_dot


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def clip_gradient(limit, x):
    """The identity; its gradient is clipped to `limit`."""
    return x


def clip_gradient_forward(limit, x):
    return x, None


def clip_gradient_backward(limit, _, gradient):
    return (jnp.clip(gradient, -limit, limit),)


clip_gradient.defvjp(clip_gradient_forward, clip_gradient_backward)


@jaxprtool.example("f32[8]", "f32[4,8]", "bool[4]")
def loss(weights, x, labels):
    """Logistic regression, with a smooth loss and a clipped gradient."""
    logits = clip_gradient(0.1, x @ weights)
    return jnp.where(labels, log1pexp(-logits), log1pexp(logits)).mean()


@jaxprtool.example("f32[8]", "f32[4,8]", "bool[4]")
def grad_loss(weights, x, labels):
    """The gradient of the loss, by the custom rules."""
    return jax.grad(loss)(weights, x, labels)


@jaxprtool.example("f32[8]")
def steepness(x):
    """The second derivative of log1pexp: the rule is itself differentiable."""
    return jax.vmap(jax.grad(jax.grad(log1pexp)))(x)
