"""Functions that bring their own derivatives: `custom_jvp` and `custom_vjp`.

Look at how the call keeps the function's jaxpr together with a rule that is still Python; only
differentiation turns the rule into equations. In `grad_loss` both rules have been traced, and no
trace of the custom calls is left.

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
    """log(1 + exp(x)), whose derivative as it stands is inf / inf where x is large."""
    return jnp.logaddexp(x, 0.0)


@log1pexp.defjvp
def log1pexp_jvp(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return log1pexp(x), jax.nn.sigmoid(x) * x_dot


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def clip_gradient(limit, x):
    """The identity, through which no gradient passes that is larger than `limit`."""
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
    """The gradient of the loss, by the rules."""
    return jax.grad(loss)(weights, x, labels)


@jaxprtool.example("f32[8]")
def steepness(x):
    """The second derivative of log1pexp: the rule is itself differentiable."""
    return jax.vmap(jax.grad(jax.grad(log1pexp)))(x)
