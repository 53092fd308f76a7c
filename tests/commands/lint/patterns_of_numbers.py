"""Patterns that rules on numerics and gradients find, and near misses, by code.

A program is a line with its arguments, whose result follows `=>`. The statements of longer ones
are on lines of their own.
"""

# ruff: noqa: E501

NUMBERS: dict[str, tuple[str, str]] = {
    "JT701": (
        # --- finds
        """
        s f32[8,16] => jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)
        s f32[8,16] => jnp.log(jnp.exp(s).sum(-1))
        s f32[8,16] => jnp.log(jnp.sum(jnp.exp(s), axis=1, keepdims=True))
        q f32[8,4], k f32[8,4] =>
            e = jnp.exp(q @ k.T / 2.0)
            return e / e.sum(-1, keepdims=True)
        q f32[8,4], k f32[8,4] =>
            e = jnp.exp(jnp.einsum("id,jd->ij", q, k))
            return e / jnp.sum(e, axis=-1)[:, None]
        s f32[8], t f32[] =>
            e = jnp.exp(s / t)
            return e / e.sum()
        s f32[8] =>
            e = jnp.exp(200 * jnp.tanh(s))
            return e / e.sum()
        a f32[8,4], b f32[8,4] =>
            a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
            b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
            return jnp.log(jnp.exp(a @ b.T / 0.005).sum(-1))
        s f32[8], m bool[8] =>
            e = jnp.where(m, jnp.exp(s), 0.0)
            e = jnp.exp(jnp.where(m, s, -1e9))
            return e / e.sum()
        s f32[8] => s - jnp.log(jnp.exp(s).sum())
        s f32[8], y f32[8] => jnp.log(jnp.exp(s).sum()) - (s * y).sum()
        s f32[8,16] => jax.vmap(lambda r: jnp.exp(r) / jnp.exp(r).sum())(s)
        s f32[8,16] =>
            e = jnp.exp(s * s)
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(s - s.mean(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True)
        s f16[8,16] =>
            e = jnp.exp(30 * jnp.tanh(s / 30))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(jnp.maximum(s, 0.0))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(jnp.abs(s))
            return e / e.sum(-1, keepdims=True)
        s bf16[8,16] =>
            e = jnp.exp(s.astype(jnp.float32))
            return (e / e.sum(-1, keepdims=True)).astype(jnp.bfloat16)
        s f32[8,16] => jax.grad(lambda s: jnp.log(jnp.exp(s).sum(-1)).sum())(s)
        s f32[8,16] =>
            e = jnp.exp(jnp.clip(s, -500.0, 500.0))
            return e / e.sum(-1, keepdims=True)
        w f32[4,8], x f32[16,4] =>
            z = jax.nn.relu(x @ w)
            return jnp.log(jnp.sum(jnp.exp(z), 1)).mean()
        s f32[8] =>
            step = lambda c, x: (c, jnp.exp(x) / jnp.exp(x).sum())
            return lax.scan(step, 0.0, jnp.outer(s, s))[1]
        """,
        # --- near misses
        """
        s f32[8,16] => jax.nn.softmax(s)
        s f32[8,16] => jax.nn.logsumexp(s, axis=-1)
        s f32[8,16] =>
            e = jnp.exp(s - s.max(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(s - lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True)))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(50.0 * jnp.tanh(s / 50.0))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16], cap f32[] =>
            e = jnp.exp(cap * jnp.tanh(s / cap))
            return e / e.sum(-1, keepdims=True)
        a f32[8,4], b f32[8,4] =>
            a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
            b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
            return jnp.log(jnp.exp(a @ b.T / 0.07).sum(-1))
        a f32[8,4], b f32[8,4], t f32[] =>
            a = a * lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6)
            b = b * lax.rsqrt(jnp.sum(b * b, -1, keepdims=True) + 1e-6)
            e = jnp.exp(jnp.einsum("id,jd->ij", a, b) / t)
            return e / e.sum(-1, keepdims=True)
        a f32[8,4], b f32[4] =>
            n = jnp.maximum(jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b), 1e-8)
            e = jnp.exp((a @ b) / n / 0.1)
            return e / e.sum()
        s f32[8,16] =>
            e = jnp.exp(jax.nn.sigmoid(s) * 8)
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(jax.scipy.special.erf(s) * 4 + 1)
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(3 * jnp.sin(s) + 2 * jnp.cos(s))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(jnp.clip(s, -20.0, 20.0))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(jnp.minimum(s, 10.0))
            return e / e.sum(-1, keepdims=True)
        x f32[8,3] =>
            d = jnp.square(x[:, None] - x[None]).sum(-1)
            e = jnp.exp(-d / 0.5)
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(5 * jax.nn.softmax(s))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            z = (s - s.mean(-1, keepdims=True)) / jnp.sqrt(s.var(-1, keepdims=True) + 1e-5)
            e = jnp.exp(z)
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(-jax.nn.softplus(s))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] =>
            e = jnp.exp(jax.nn.log_sigmoid(s))
            return jnp.log(e.sum(-1))
        s f32[8,16] =>
            e = jnp.exp(s / (1 + jnp.abs(s)))
            return e / e.sum(-1, keepdims=True)
        s f32[8,16] => jnp.exp(s).sum(-1)
        s f32[8,16] => jnp.exp(s) / (1 + jnp.exp(s))
        s f32[8,16], m bool[8,16] =>
            e = jnp.exp(jnp.where(m, 10 * jnp.tanh(s), -1e9))
            return e / e.sum(-1, keepdims=True)
        t f32[8] =>
            e = jnp.exp(-jnp.square(t))
            return e / e.sum()
        x f32[8,4] =>
            x = x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
            e = jnp.exp(x @ x.T)
            return e / e.sum(-1, keepdims=True)
        """,
    ),
    "JT702": (
        """
        x f32[8] => jnp.where(x > 0, jnp.log(x), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()
        x f32[8] => jnp.where(x != 0, 1.0 / x, 0.0).sum()
        x f32[8], y f32[8] => jnp.where(x > 0, y / x, 0.0).sum()
        x f32[8] => jnp.where(x <= 0, 0.0, jnp.log(x)).mean()
        x f32[8] => jnp.where(x > -1, jnp.log1p(x), 0.0).sum()
        x f32[8] => jnp.where(jnp.abs(x) < 1, jnp.arcsin(x), 0.0).sum()
        x f32[8] => jnp.where(x > 0, x * jnp.log(x), 0.0).sum()
        x f32[8] => jnp.where(x > 1, jnp.arccosh(x), 0.0).sum()
        x f32[8] => jnp.where(x != 0, jnp.sin(x) / x, 1.0).sum()
        x f32[8,3] =>
            n = jnp.square(x).sum(-1)
            return jnp.where(n > 0, jnp.sqrt(n), 0.0).sum()
        x f32[8,3] =>
            n = jnp.linalg.norm(x, axis=-1, keepdims=True)
            return jnp.where(n > 0, x / n, 0.0).sum()
        p f32[8] => -jnp.where(p > 0, p * jnp.log(p), 0.0).sum()
        x f32[8] => jnp.where(x > 0, x**-0.5, 0.0).sum()
        x f32[8] => jnp.where(x > 0, lax.rsqrt(x), 0.0).sum()
        x f32[8] => jax.grad(lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum())(x)
        x f32[8] => jax.vmap(lambda t: jnp.where(t > 0, jnp.log(t), 0.0))(x).sum()
        x f32[8] => lax.scan(lambda c, t: (c + jnp.where(t > 0, jnp.log(t), 0.0), c), 0.0, x)[0]
        x f32[8] => lax.select(x > 0, jnp.sqrt(x), jnp.zeros_like(x)).sum()
        x f32[8] => jnp.where(jnp.abs(x) < 1, jnp.arctanh(x), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.power(x, 0.3), 0.0).sum()
        x f32[8], n i32[8] => jnp.where(n > 0, x / n, 0.0).sum()
        """,
        """
        x f32[8] => jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.log(jnp.maximum(x, 1e-6)), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.sqrt(jnp.square(x) + 1e-6), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.log(x), 0.0)
        x f32[8] => (lax.stop_gradient(jnp.where(x > 0, jnp.log(x), 0.0)) * x).sum()
        x f32[8] => (jnp.where(x > 0, jnp.log(lax.stop_gradient(x)), 0.0) * x).sum()
        x f32[8] => jnp.where(x > 0, jnp.log(jnp.clip(x, 1e-3, 1.0)), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.tanh(x), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.exp(x), 0.0).sum()
        x f32[8], y f32[8] => (x * jnp.where(y > 0, jnp.log(y), 0.0)).sum()
        x f32[8] => jnp.where(x > 0, jnp.log1p(x * x), 0.0).sum()
        x f32[8], m bool[8] => jnp.where(m, jnp.sqrt(jnp.exp(x)), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.log(jnp.cosh(x)), 0.0).sum()
        x f32[8] => jnp.where(x > 0, x / (1 + x * x), 0.0).sum()
        x f32[8] => jnp.where(x > 0, jnp.log(jnp.exp(x) + 1.0), 0.0).sum()
        x f32[8] => jnp.round(jnp.where(x > 0, jnp.log(x), 0.0)).sum() + (x * x).sum()
        x f32[8] => (jnp.where(x > 0, jnp.log(x), 0.0) > 1).sum() * x.sum()
        x f32[8] => jnp.where(x > 0, x / 2.0, 0.0).sum()
        x f32[8] => jax.grad(lambda x: (lax.stop_gradient(jnp.where(x > 0, jnp.log(x), 0.0)) * x).sum())(x)
        x f32[8] => jnp.where(x > 0, jnp.sqrt(jax.nn.sigmoid(x)), 0.0).sum()
        x f32[8] => jax.scipy.special.xlogy(jnp.abs(x), jnp.abs(x) + 1).sum()
        """,
    ),
    "JT703": (
        """
        s f32[8,16] => -jnp.log(jax.nn.softmax(s)).mean()
        s f32[8,16], y i32[8] => -jnp.log(jax.nn.softmax(s)[jnp.arange(8), y]).mean()
        s f32[8,16], y i32[8] => -jnp.log(jnp.take_along_axis(jax.nn.softmax(s), y[:, None], 1))
        s f32[8,16], y i32[8] => -jnp.log((jax.nn.softmax(s) * jax.nn.one_hot(y, 16)).sum(-1))
        s f32[8,16], y i32[8] => -(jax.nn.one_hot(y, 16) * jnp.log(jax.nn.softmax(s))).sum()
        s f32[8,16] =>
            e = jnp.exp(s - s.max(-1, keepdims=True))
            return jnp.log(e / e.sum(-1, keepdims=True))
        s f32[16], y i32[] => -jnp.log(jax.nn.softmax(s)[y])
        s f32[8,16], y i32[8] => jax.vmap(lambda r, i: -jnp.log(jax.nn.softmax(r)[i]))(s, y)
        s f32[8], y f32[8] => -(y * jnp.log(jax.nn.sigmoid(s))).mean()
        s f32[8], y f32[8] => -((1 - y) * jnp.log(1 - jax.nn.sigmoid(s))).mean()
        s f32[8] => jnp.log1p(-jax.nn.sigmoid(s)).sum()
        s f32[8] => jnp.log(1 / (1 + jnp.exp(-s))).sum()
        s f32[8,16], a i32[8] =>
            p = jax.nn.softmax(s, axis=-1)
            return jnp.log(p[jnp.arange(p.shape[0]), a])
        s f32[8,16] =>
            p = jax.nn.softmax(s)
            return -(p * jnp.log(p)).sum(-1)
        s f32[8,16], q f32[8,16] => (q * (jnp.log(q) - jnp.log(jax.nn.softmax(s)))).sum()
        s f32[8,16] => jnp.log2(jax.nn.softmax(s))
        s f32[8,16] => jnp.log10(jax.nn.softmax(s))
        s bf16[8,16] => jnp.log(jax.nn.softmax(s).astype(jnp.float32))
        s f32[8,16], y i32[8] => jax.grad(lambda s: -jnp.log(jax.nn.softmax(s)[jnp.arange(8), y]).sum())(s)
        s f32[8,16], y i32[8] => jnp.log(jnp.einsum("ij,ij->i", jax.nn.softmax(s), jax.nn.one_hot(y, 16)))
        s f32[8,16], y i32[8] =>
            hot = y[:, None] == jnp.arange(16)
            return jnp.log(jnp.where(hot, jax.nn.softmax(s), 0.0).sum(-1))
        s f32[8,16] => jnp.log(jax.nn.softmax(s)[:, 0]).mean()
        s f32[8,16], y i32[] => jnp.log(lax.dynamic_index_in_dim(jax.nn.softmax(s), y, 1))
        s f32[8,2] => jnp.log(jax.nn.softmax(s)[:, 1:]).sum()
        """,
        """
        s f32[8,16] => -jax.nn.log_softmax(s).mean()
        s f32[8,16], y i32[8] => -jax.nn.log_softmax(s)[jnp.arange(8), y].mean()
        s f32[8,16], y i32[8] => -jnp.take_along_axis(jax.nn.log_softmax(s), y[:, None], 1).mean()
        s f32[8,16] => jnp.log(jax.nn.softmax(s) + 1e-8)
        s f32[8,16] => jnp.log(jnp.clip(jax.nn.softmax(s), 1e-7, 1.0))
        s f32[8,16] => jnp.log(jnp.maximum(jax.nn.softmax(s), 1e-12))
        p f32[8,16], y i32[8] => -jnp.log(p[jnp.arange(8), y]).mean()
        s f32[8], y f32[8] => -(y * jax.nn.log_sigmoid(s)).mean()
        s f32[8], y f32[8] => (jax.nn.softplus(s) - y * s).mean()
        s f32[8,16] => s - jax.nn.logsumexp(s, axis=-1, keepdims=True)
        x f32[8] => jnp.log(1 + jnp.exp(-jnp.abs(x)))
        x f32[8] => jnp.log(x / x.sum())
        x f32[8] => jnp.log1p(jax.nn.sigmoid(x))
        x f32[8] => jnp.log(1 + jax.nn.sigmoid(x))
        s f32[8,16] => jnp.log(jax.nn.softmax(s).sum(0))
        s f32[8,16] => jnp.log(jax.nn.softmax(s) @ jnp.ones((16, 4)))
        s f32[8,16] => jnp.log(jax.nn.softmax(s).max(-1))
        s f32[8,16] => jnp.exp(jax.nn.softmax(s))
        s f32[8,16] => jnp.log(0.9 * jax.nn.softmax(s) + 0.1 / 16)
        s f32[8,16], y f32[16] => jnp.log((jax.nn.softmax(s) * y).sum(-1))
        x f32[8] => jnp.log(jnp.exp(x) / 2)
        x f32[8] => jnp.log(jnp.tanh(x) + 1.5)
        """,
    ),
    "JT704": (
        """
        x f32[16,3] => jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1)).sum()
        x f32[16,3] => jnp.linalg.norm(x[:, None] - x[None, :], axis=-1).sum()
        x f32[16,3] => jnp.sqrt(jnp.sum(jnp.square(x[:, None, :] - x), axis=-1)).mean()
        x f32[16,3] =>
            g = x @ x.T
            s = jnp.diag(g)
            return jnp.sqrt(jnp.maximum(s[:, None] + s[None] - 2 * g, 0.0)).sum()
        x f32[16,3] =>
            s = (x**2).sum(-1)
            return jnp.sqrt(jnp.maximum(s[:, None] + s[None, :] - 2 * x @ x.T, 0)).sum()
        x f32[16,3] =>
            s = (x * x).sum(-1, keepdims=True)
            return jnp.sqrt(jax.nn.relu(s + s.T - 2 * jnp.dot(x, x.T))).sum()
        x f32[16,3] =>
            s = jnp.sum(x**2, -1)
            return jnp.sqrt(jnp.clip(s[:, None] - 2 * x @ x.T + s[None], 0)).sum()
        x f32[16,3] =>
            s = jnp.sum(x**2, -1)
            return jnp.sqrt(jnp.abs(s[:, None] + s[None] - 2 * jnp.einsum("id,jd->ij", x, x))).sum()
        x f32[16,3] =>
            d = x[:, None] - x[None]
            return jnp.sqrt(jnp.einsum("ijk,ijk->ij", d, d)).sum()
        x f32[16,3] => jax.vmap(lambda a: jax.vmap(lambda b: jnp.sqrt(jnp.sum((a - b) ** 2)))(x))(x).sum()
        x f32[16,3] => jax.vmap(lambda a: jnp.sqrt(((a - x) ** 2).sum(-1)))(x).sum()
        x f32[16,3] => jnp.exp(-jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))).sum()
        x f32[16,3] => (((x[:, None] - x[None]) ** 2).sum(-1) ** 0.5).sum()
        x f32[16,3] => jnp.sqrt(((x[None] - x[:, None]) ** 2).sum(2)).max()
        x f32[16,3] => jax.grad(lambda x: jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1)).sum())(x)
        x f32[16,3] => jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1)).min(where=jnp.eye(16) == 0, initial=9.0)
        x f32[16,1] => jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1)).sum()
        x f32[2,16,3] => jnp.sqrt(((x[:, :, None] - x[:, None]) ** 2).sum(-1)).sum()
        x f32[16,3] =>
            d = jnp.expand_dims(x, 1) - jnp.expand_dims(x, 0)
            return jnp.power(jnp.sum(d * d, -1), 0.5).sum()
        x f32[16,3] => lax.rsqrt(((x[:, None] - x[None]) ** 2).sum(-1)).sum()
        """,
        """
        x f32[16,3], y f32[16,3] => jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1)).sum()
        x f32[16,3] => jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 1e-9).sum()
        x f32[16,3] => ((x[:, None] - x[None]) ** 2).sum()
        x f32[16,3] => jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))
        x f32[16,3] => jnp.sqrt(((x[1:] - x[:-1]) ** 2).sum(-1)).sum()
        x f32[16,3] => jnp.sqrt((x**2).sum(-1)).sum()
        x f32[16,3] => jnp.sqrt(((x - x.mean(0)) ** 2).sum(-1)).sum()
        x f32[16,3] =>
            d = ((x[:, None] - x[None]) ** 2).sum(-1)
            return jnp.where(d == 0, 0.0, jnp.sqrt(jnp.where(d == 0, 1.0, d))).sum()
        x f32[16,3] => jnp.sqrt(jnp.maximum(((x[:, None] - x[None]) ** 2).sum(-1), 1e-12)).sum()
        x f32[16,3], y f32[8,3] =>
            a, b = (x**2).sum(-1), (y**2).sum(-1)
            return jnp.sqrt(jnp.maximum(a[:, None] + b[None] - 2 * x @ y.T, 0)).sum()
        x f32[16,3] =>
            s = (x**2).sum(-1)
            return jnp.sqrt(jnp.maximum(s[:, None] + s[None] - 2 * x @ x.T, 1e-6)).sum()
        x f32[16,3] => jnp.sqrt(1 + jnp.diag(x @ x.T)).sum()
        x f32[16,3] => (lax.stop_gradient(jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))) * (x @ x.T)).sum()
        x f32[16,3] => jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)).sum()
        x f32[16,3] => jnp.abs(x[:, None] - x[None]).sum()
        x f32[16,3] =>
            i, j = np.triu_indices(16, 1)
            return jnp.sqrt(((x[i] - x[j]) ** 2).sum(-1)).sum()
        x f32[16,3] =>
            d = ((x[:, None] - x[None]) ** 2).sum(-1) + jnp.eye(16)
            return jnp.sqrt(d).sum()
        x f32[16,3] => ((((x[:, None] - x[None]) ** 2).sum(-1)) ** 1.5).sum()
        x f32[16,3] => jnp.log1p(((x[:, None] - x[None]) ** 2).sum(-1)).sum()
        x f32[16,3] => jnp.sqrt(((x[:, None] - x[None] + 0.5) ** 2).sum(-1)).sum()
        x f32[16,3], y i32[16] => (x[y] - x).sum()
        """,
    ),
    "JT801": (
        """
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.round(p["a"]) * p["w"] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.floor(p["a"]) * p["w"] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.sign(p["a"]) * p["w"] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => ((p["a"] > 0) * p["w"] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["a"].astype(jnp.int32) * p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["w"] * x)[jnp.argmax(p["a"])]
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => jnp.where(x > p["a"], p["w"], 0.0).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["w"][jnp.argsort(p["a"])] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.ceil(p["a"] * 4) / 4 * p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["w"] * jax.nn.one_hot(p["a"].argmax(), 64)).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["w"] * jnp.isfinite(p["a"])).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.trunc(p["a"]) + p["w"] * x).sum()
        w f32[64], x f32[64] => jnp.square(jnp.round(w * x)).sum()
        w f32[64], x f32[64] => lax.stop_gradient(jnp.square(w - x)).mean()
        w f32[64], x f32[64] => jnp.square(jnp.argmax(w[:, None] * x, -1) - 3.0).mean()
        w f32[64], x f32[64] => jnp.square((w * x).astype(jnp.int32).astype(jnp.float32)).mean()
        w f32[64], x f32[64] => jnp.square(lax.stop_gradient(w) * lax.stop_gradient(x)).mean()
        w f32[64], x f32[64] => jnp.abs(jnp.sign(w) - jnp.sign(x)).mean()
        w f32[8,8], x f32[8] => jnp.square(jnp.floor(w @ x) - 1).mean()
        w f32[64] => jnp.square(jnp.sort(w).astype(jnp.int32)).astype(jnp.float32).mean()
        w f32[64], x f32[64] => lax.fori_loop(0, 3, lambda i, c: jnp.round(c), w * x).sum()
        w f32[64], x f32[64] => lax.scan(lambda c, t: (c + jnp.round(t), None), 0.0, w * x)[0]
        """,
        """
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["a"] * p["w"] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (lax.stop_gradient(p["a"]) * p["w"] * x).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            q = p["a"] + lax.stop_gradient(jnp.round(p["a"]) - p["a"])
            return (q * p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.maximum(p["a"], 0) * p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.abs(p["a"]) * p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.round(p["a"]) * p["w"] + p["a"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (jnp.sort(p["a"]) * p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => jnp.where(x > 0, p["a"], p["w"]).sum()
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => (p["a"].astype(jnp.bfloat16) * p["w"]).sum()
        w f32[8,4], x f32[16,8], y i32[16] => (jnp.argmax(x @ w, -1) == y).mean()
        w f32[8,4], x f32[16,8], y i32[16] => 1 - (jnp.argmax(x @ w, -1) == y).mean()
        w f32[8], x f32[16,8], y bool[16] =>
            hits = ((x @ w > 0) & y).sum()
            return hits / jnp.maximum((x @ w > 0).sum(), 1)
        w f32[64], x f32[64] => (w > x).sum().astype(jnp.float32)
        s f32[] => 0.1 * 0.5 ** jnp.floor(s / 10)
        w f32[64], x f32[64] => jnp.round(w)
        w f32[64], x f32[64] => jax.grad(lambda w: (jnp.round(x) * w).sum())(w)
        x f32[64], w f32[64] => (jnp.round(x) * w).sum()
        n i32[64], w f32[64] => (n * w).sum()
        w f32[64] => jax.jit(lambda w: jnp.tanh(w).sum())(w)
        w f32[64], x f32[64] => lax.scan(lambda c, t: (c + t, jnp.round(c)), 0.0, w * x)[0]
        w f32[64] => jax.checkpoint(lambda w: jnp.sin(w).sum())(w)
        w f32[64], x f32[64] => jnp.linalg.norm(w - x)
        """,
    ),
    "JT803": (
        """
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (jnp.round(p["a"]) * p["w"] * x).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (p["w"] * x).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => jax.grad(lambda p: (p["w"] * x).sum())(p)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => jax.value_and_grad(lambda p: ((p["a"] > 0) * p["w"] * x).sum())(p)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] => jax.value_and_grad(lambda p: (p["w"] * x).sum())(p)
        p {'a': f32[64], 'w': f32[64]}, m {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (jnp.floor(p["a"]) * p["w"] * x).sum())(p)
            m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
            return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m
        p {'a': f32[64], 'w': f32[64]}, m {'a': f32[64], 'w': f32[64]}, v {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            value, g = jax.value_and_grad(lambda p: (jnp.sign(p["a"]) * p["w"] * x).sum())(p)
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
            v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
            return jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), p, m, v), m, v, value
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (lax.stop_gradient(p["a"]) * p["w"] * x).sum())(p)
            return jax.tree.map(lambda p, g: 0.99 * p - 0.1 * g, p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (p["a"].astype(jnp.int32) * p["w"]).sum())(p)
            norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(g)))
            return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            step = lambda p, x: (jax.tree.map(lambda p, g: p - g, p, jax.grad(lambda p: (jnp.round(p["a"]) * p["w"] * x).sum())(p)), None)
            return lax.scan(step, p, jnp.outer(x, x))[0]
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.jit(jax.grad(lambda p: (p["w"] * x).sum()))(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        p {'a': f32[8,8], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (p["w"][jnp.argsort(p["a"].ravel())] * x).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * jnp.clip(g, -1, 1), p, g)
        a f32[64], w f32[64], x f32[64] =>
            da, dw = jax.grad(lambda a, w: (jnp.ceil(a) * w * x).sum(), argnums=(0, 1))(a, w)
            return a - da, w - dw
        w f32[64], x f32[64] => w - jax.grad(lambda w: jnp.square(jnp.round(w * x)).sum())(w)
        p {'a': f32[64], 'w': f32[64]}, e {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (jnp.round(p["a"]) * p["w"] * x).sum())(p)
            p = jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
            return p, jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, e, p)
        p {'a': f32[64], 'w': f32[64]}, x f32[16,64] =>
            loss = lambda p: jax.vmap(lambda x: (jnp.trunc(p["a"]) * p["w"] * x).sum())(x).mean()
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (jnp.isfinite(p["a"]) * jax.checkpoint(jnp.sin)(p["w"] * x)).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            (value, aux), g = jax.value_and_grad(lambda p: ((p["w"] * x).sum(), p["a"].sum()), has_aux=True)(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), value, aux
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: jnp.where(x > p["a"], p["w"], 0.0).sum())(p)
            return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(jnp.float32), p, g)
        p {'a': bf16[64], 'w': bf16[64]}, x bf16[64] =>
            g = jax.grad(lambda p: (jnp.round(p["a"]) * p["w"] * x).sum())(p)
            return jax.tree.map(lambda p, g: (p.astype(jnp.float32) - 0.1 * g.astype(jnp.float32)).astype(p.dtype), p, g)
        """,
        """
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (p["a"] * p["w"] * x).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda w: (jnp.round(p["a"]) * w * x).sum())(p["w"])
            return {"a": p["a"], "w": p["w"] - g}
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (jnp.round(p["a"]) * p["w"] * x + p["a"]).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (p["a"] * p["w"] * x).sum())(p)
            return {"a": p["a"] + jnp.zeros_like(g["a"]), "w": p["w"] - g["w"]}
        p {'a': f32[64], 'w': f32[64]}, t {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            loss = lambda p, t: jnp.square(lax.stop_gradient(t["a"] * t["w"]) - p["a"] * p["w"] * x).sum()
            p = jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, t))
            return p, jax.tree.map(lambda t, p: 0.99 * t + 0.01 * p, t, p)
        p {'a': f32[64], 'w': f32[64]}, m {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: (jnp.abs(p["a"]) * p["w"] * x).sum())(p)
            m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
            return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m
        w f32[64], x f32[64] => w - jax.grad(lambda w: jnp.square(w * x).sum())(w)
        w f32[64], x f32[64] => jax.grad(lambda w: (jnp.round(x) * w).sum())(w)
        w f32[64], x f32[64] => jax.value_and_grad(lambda w: (w * x).sum())(w)
        w f32[64], x f32[64] => (jnp.round(w) * x).sum()
        w f32[64], x f32[64] => w + jnp.zeros(64) * x
        w f32[64], s f32[64], x f32[64] =>
            value, g = jax.value_and_grad(lambda w: (w * x).sum())(w)
            return w - g, 0.9 * s + jnp.zeros(64), value
        w f32[8,8], x f32[8] => w - jax.grad(lambda w: lax.scan(lambda h, _: (jnp.tanh(w @ h), None), x, None, length=4)[0].sum())(w)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            q = lambda a: a + lax.stop_gradient(jnp.round(a) - a)
            g = jax.grad(lambda p: (q(p["a"]) * p["w"] * x).sum())(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        w f32[64], x f32[64] => jax.jvp(lambda w: (jnp.round(w) * x).sum(), (w,), (x,))
        w f32[64], x f32[64] => jax.hessian(lambda w: (w * x).sum())(w)
        w f32[64], x f32[64] => jax.vmap(jax.grad(lambda w, x: jnp.sin(w * x)))(w, x)
        w f32[64], x f32[64] => w - 0.1 * jax.grad(jax.checkpoint(lambda w: jnp.sin(w * x).sum()))(w)
        w f32[8,8], x f32[8] => w - jax.grad(lambda w: jnp.where(x > 0, w @ x, 0.0).sum())(w)
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            step = lambda p, x: (jax.tree.map(lambda p, g: p - g, p, jax.grad(lambda p: (p["a"] * p["w"] * x).sum())(p)), None)
            return lax.scan(step, p, jnp.outer(x, x))[0]
        p {'a': f32[64], 'w': f32[64]}, x f32[64] =>
            g = jax.grad(lambda p: lax.cond(x[0] > 0, lambda: (p["a"] * x).sum(), lambda: (p["w"] * x).sum()))(p)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)
        """,
    ),
    "JT804": (
        """
        n i32[], g f32[8] => 0.1 * (1 - n // 100) * g
        n i32[], g f32[8] => 0.1 * (1.0 - n // 100) * g
        n i32[], g f32[8] => jnp.minimum(n // 100, 1) * 0.1 * g
        n i32[], g f32[8] => jnp.minimum(1, n // 100) * g
        n i32[], g f32[8] => jnp.minimum(1.0, n // 100) * g
        n i32[], g f32[8] => jnp.clip(n // 100, 0, 1) * g
        n i32[], g f32[8] => jnp.maximum(1 - n // 100, 0) * g
        n i32[], g f32[8] => (1 - jnp.floor(n / 100)) * g
        n i32[], g f32[8] => (1 - jnp.round(n / 100)) * g
        n i32[], g f32[8] => (1 - (n / 100).astype(jnp.int32)) * g
        n u32[], g f32[8] => (1 - n // 100) * 0.1 * g
        n f32[], g f32[8] => (1.0 - n // 100.0) * g
        n i32[], g f32[8] => (1 - (n - 10) // 90) * g
        n i32[], g bf16[8] => (1 - n // 100).astype(jnp.bfloat16) * g
        n i32[], g f32[8] => jnp.where(n < 10, 0.1, 0.1 * (1 - n // 100)) * g
        n i32[], g f32[8] => (1 - n // 100) ** 2.0 * g
        n i32[], g f32[8] => 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(n // 100, 1))) * g
        n i32[], g f32[8] => 0.01 + (0.1 - 0.01) * (1 - n // 1000) + g
        n i32[], m i32[], g f32[8] => (1 - n // m) * g
        n i32[], g f32[8] => jax.jit(lambda n: 1 - n // 100)(n) * g
        """,
        """
        n i32[], g f32[8] => 0.1 * (1 - n / 100) * g
        n i32[], g f32[8] => 0.1 * 0.5 ** (n // 100) * g
        n i32[], g f32[8] => 0.1 * 0.5 ** jnp.floor(n / 100) * g
        n i32[], g f32[8] => jnp.minimum(n / 100, 1) * g
        n i32[], g f32[8] => jnp.clip(n / 100, 0, 1) * g
        n i32[], g f32[8] => (1 - (n // 10) / 100) * g
        n i32[], g f32[8] => 0.1 / (1 + n // 100) * g
        n i32[], g f32[8] => g[1 - n // 100]
        n i32[], g f32[8] => jnp.minimum(n // 100, 7) * g
        n i32[], g f32[8] => g[jnp.minimum(n // 100, 1)]
        n i32[], g f32[8] => jnp.where(n // 100 % 2 == 0, 0.1, 0.2) * g
        n i32[8], g f32[8] => (1 - n // 4) * g
        n i32[], g f32[8] => (1 - jnp.arange(8) // 4) * g
        n i32[], g f32[8] => (2 - n // 100) * g
        n i32[], g f32[8] => (1 - n) * g
        n i32[], g f32[8] => 1 - n // 100
        n i32[], g f32[8] => (1 - n / 100) // 1 * g
        x f32[], g f32[8] => (1 - jnp.round(x)) * g
        x f32[], g f32[8] => (x - jnp.floor(x)) * g
        x f32[], g f32[8] => (1 - jnp.exp(x) / 100) * g
        n i32[], g f32[8] => (1 - n % 2) * g
        n i32[], g f32[8] => (n // 100 - 1) * g
        """,
    ),
    "JT802": (
        """
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(x @ w).mean())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).mean())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jax.nn.gelu(x @ w))(w).mean()
        w f32[4,32,32], x f32[16,32] =>
            def f(w):
                y = x
                for i in range(4):
                    y = jnp.tanh(y @ w[i])
                return y.mean()
            return jax.checkpoint(f)(w)
        w f32[32,32], x f32[16,32] => jax.remat(lambda w, x: jnp.square(jnp.sin(x @ w)).mean())(w, x)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jax.nn.softmax(x @ w).max(-1).mean())(w)
        w f32[32,32], x f32[16,32] => 2.0 * jax.checkpoint(lambda w: jnp.cos(x @ w).mean())(w)
        w f32[32,32], x f32[16,32] => jnp.log(jax.checkpoint(lambda w: jnp.exp(x @ w).mean())(w))
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jax.jit(lambda w: jnp.tanh(x @ w).mean())(w))(w)
        w f32[32,32], x f32[16,32] => jax.jit(lambda w: jax.checkpoint(lambda w: jnp.tanh(x @ w).mean())(w))(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jax.vmap(lambda r: jnp.tanh(r @ w))(x).mean())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(x @ w), policy=jax.checkpoint_policies.everything_saveable)(w).mean()
        w f32[32,32], x f32[16,32] => jnp.sin(jax.checkpoint(lambda w: x @ w, policy=jax.checkpoint_policies.everything_saveable)(w) @ w).mean()
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: ((x @ w) ** 2).mean())(w) + jnp.sum(w[0])
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.linalg.norm(x @ w))(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: (jax.nn.relu(x @ w) @ w).sum())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: lax.fori_loop(0, 4, lambda i, y: jnp.tanh(y @ w), x).mean())(w)
        w f32[4,32,32], x f32[16,32] => jax.checkpoint(lambda w: lax.scan(lambda y, m: (jnp.tanh(y @ m), None), x, w)[0].mean())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.einsum("ij,jk->ik", x, w).std())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.sort(x @ w).mean())(w)
        """,
        """
        w f32[32,32], x f32[16,32] => jnp.tanh(x @ w).mean()
        w f32[4,32,32], x f32[16,32] =>
            for i in range(4):
                x = jax.checkpoint(lambda x, m: jnp.tanh(x @ m))(x, w[i])
            return x.mean()
        w f32[4,32,32], x f32[16,32] => lax.scan(jax.checkpoint(lambda y, m: (jnp.tanh(y @ m), None)), x, w)[0].mean()
        w f32[4,32,32], x f32[16,32] =>
            layer = jax.checkpoint(lambda x, m: jnp.tanh(x @ m))
            return jax.checkpoint(lambda x: layer(layer(x, w[0]), w[1]))(x).mean()
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(x @ w))(w)
        w f32[4,4], x f32[2,4] => jax.checkpoint(lambda w: jnp.tanh(x @ w).mean())(w)
        w f32[32,32], x f32[16,32] => jax.grad(jax.checkpoint(lambda w: jnp.tanh(x @ w).mean()))(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(x @ w), policy=jax.checkpoint_policies.dots_saveable)(w).mean()
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(x @ w), policy=jax.checkpoint_policies.nothing_saveable)(w).mean()
        w f32[32,32], x f32[16,32] => (jax.checkpoint(lambda w: jnp.tanh(x @ w))(w) @ w).mean()
        w f32[32,32], x f32[16,32] => jnp.tanh(jax.checkpoint(jnp.sin)(x @ w)).mean()
        w f32[32,32], x f32[16,32] => (jax.checkpoint(lambda w: jnp.tanh(x @ w))(w) + jnp.sin(x @ w)).mean()
        w f32[32,32], x f32[16,32] => jax.jit(lambda w: jnp.tanh(x @ w).mean())(w)
        w f32[32,32], x f32[16,32] => jnp.tanh(x @ w).sum(0)
        w f32[32,32], x f32[16,32] => lax.fori_loop(0, 4, lambda i, y: jax.checkpoint(lambda y: jnp.tanh(y @ w))(y), x).mean()
        w f32[32,32], x f32[16,32] => (jnp.tanh(x @ w) @ w + jax.checkpoint(lambda x: jnp.sin(x))(x)).mean()
        w f32[64] => jax.checkpoint(lambda w: jnp.sin(w).sum())(w)
        w f32[32,32], x f32[16,32] => jax.checkpoint(lambda w: jnp.tanh(x @ w), policy=jax.checkpoint_policies.save_only_these_names("a"))(w).mean()
        w f32[32,32], x f32[16,32] =>
            first = jax.checkpoint(lambda w: jnp.tanh(x @ w))(w)
            return jax.checkpoint(lambda y: jnp.tanh(y @ w))(first).mean()
        w f32[32,32], x f32[16,32] => jnp.mean(jax.lax.map(lambda r: jax.checkpoint(lambda r: jnp.tanh(r @ w))(r), x))
        """,
    ),
}
