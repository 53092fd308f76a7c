"""Patterns that rules on memory, types, indices, loops and keys find, and near misses, by code.

A program is a line with its arguments (a star marks a donated one), whose result follows `=>`. The
statements of longer ones are on lines of their own. `BIG` is a constant of 1 MiB.
"""

# ruff: noqa: E501

STRUCTURE: dict[str, tuple[str, str]] = {
    "JT101": (
        """
        x f32[2,512] => x @ BIG
        x f32[512] => BIG + x
        x f32[2,512] => jnp.tanh(x @ BIG).sum()
        x f32[2,512] => jax.jit(lambda x: x @ BIG)(x)
        x f32[2,512] => jax.vmap(lambda r: BIG @ r)(x)
        x f32[512] => jax.grad(lambda x: (BIG @ x).sum())(x)
        x f32[2,512] => lax.scan(lambda c, r: (c + BIG @ r, None), jnp.zeros(512), x)[0]
        x f32[512] => lax.cond(x[0] > 0, lambda x: BIG @ x, lambda x: x, x)
        x f32[512] => lax.fori_loop(0, 3, lambda i, x: BIG @ x, x)
        i i32[4] => jnp.asarray(BIG)[i]
        x f32[512] => jnp.where(x > 0, BIG, 0.0)
        x f32[2,512] => jnp.einsum("ij,jk->ik", x, BIG)
        x f32[512] => jax.checkpoint(lambda x: BIG @ x)(x)
        x f32[512] => BIG.T @ x
        x f32[2,512] => x @ np.zeros((512, 600), np.float32)
        x i32[4] => jnp.asarray(np.arange(2**18, dtype=np.int32))[x]
        x f32[4] => x[0] * np.random.RandomState(0).rand(2**19).astype(np.float32)
        x bf16[2,512] => x @ np.ones((512, 1024), jnp.bfloat16)
        x f32[2,512] => (x @ BIG) @ BIG
        x f32[512] => lax.map(lambda r: (r * x).sum(), BIG)
        x f32[512] => jnp.stack([BIG @ x, x])
        x bool[2048,1024] => x & np.ones((2048, 1024), bool)
        """,
        """
        x f32[2,512], w f32[512,512] => x @ w
        x f32[2,64] => x @ np.ones((64, 64), np.float32)
        x f32[512] => jnp.ones((512, 512)) @ x
        x f32[512] => jnp.zeros((512, 512)) + x
        x f32[512] => jnp.eye(512) @ x
        x f32[512] => jnp.arange(2**18).reshape(512, 512) + x
        x f32[512] => x * BIG.sum()
        x f32[512] => x * BIG[0]
        x f32[512] => x * BIG.shape[0]
        x f32[512] => x @ np.ones((512, 500), np.float32)
        x f32[512] => jnp.full((512, 512), 2.0) @ x
        x f32[512] => jnp.tril(jnp.ones((512, 512))) @ x
        x f32[512] => jnp.linspace(0, 1, 2**18).reshape(512, 512) @ x
        x f32[512] => jnp.broadcast_to(np.ones(512, np.float32), (512, 512)) @ x
        x f32[512] => x[None] * np.ones((512, 1), np.float32)
        x f32[512] => x + np.float32(BIG.mean())
        x f32[512] => random.normal(random.key(0), (512, 512)) @ x
        x f32[512] => jnp.outer(x, x)
        x f32[512,512] => jnp.tanh(x)
        x f32[2,512], w f32[512,512] => jax.jit(lambda x, w: x @ w)(x, w)
        x f32[512] => jnp.asarray(BIG[:256]) @ x
        """,
    ),
    "JT201": (
        """
        x f32[8] => x * np.linspace(0.0, 1.0, 8)
        x f32[8] => x + np.ones(8)
        x f32[8] => x * np.array(0.1)
        x f32[8] => x + jnp.linspace(0.0, 1.0, 8)
        x f32[8] => x - np.mean(np.arange(8.0))
        x f32[8] => jnp.ones(8) * x
        x f32[8] => x @ np.eye(8)
        x f32[8] => jnp.where(x > 0, x, np.zeros(8))
        x f32[8] => jnp.concatenate([x, np.zeros(2)])
        x f32[8], k key(0) => x + random.normal(k, (8,))
        x f32[8] => jax.vmap(lambda t: t * np.array(2.5))(x)
        x f32[8] => x * np.sqrt(8)
        x f32[8] => jnp.maximum(x, np.full(8, 0.5))
        x f32[8] => x / np.arange(1.0, 9.0)
        x f32[8] => jnp.zeros(8).at[0].set(1.0) + x
        x f32[8] => x + jnp.arange(8.0)
        x f32[8] => jnp.full(8, np.array(0.5)) * x
        x bf16[8] => x * np.ones(8)
        x f32[8] => jax.jit(lambda x: x * np.linspace(1, 2, 8))(x)
        x f32[8] => lax.fori_loop(0, 2, lambda i, c: c * np.ones(8), jnp.ones(8)) + x
        x f32[8] => x + jnp.eye(8)[0]
        """,
        """
        x f32[8] => x * 2.0
        x f32[8] => x * np.linspace(0.0, 1.0, 8).astype(np.float32)
        x f32[8] => x + np.float32(0.5)
        x f32[8] => x + jnp.ones_like(x)
        x f32[8] => x + jnp.ones(8, x.dtype)
        x f64[8] => x + np.ones(8)
        x f64[8] => jnp.tanh(x) @ np.eye(8)
        x f32[8], y f64[8] => x + y
        x f32[8] => x.astype(jnp.float64) * 2
        x f32[8] => x.astype("float64").cumsum()
        i i32[8] => i * 2.5
        i i64[8] => i + 1
        x f32[8] => x + jnp.arange(8, dtype=jnp.float32)
        x f32[8], k key(0) => x + random.normal(k, (8,), jnp.float32)
        x f32[8] => jnp.where(x > 0, x, 0.0)
        x f32[8] => x[jnp.arange(4)]
        x f32[8] => jnp.mean(x) * 3.5
        x f32[8] => x / np.float32(3)
        x f32[8] => jnp.asarray(np.ones(8), jnp.float32) * x
        x f32[8] => lax.fori_loop(0, 2, lambda i, c: c * 2.5, x)
        x bf16[8] => x.astype(jnp.float32) + 1.5
        x f32[8] => x * jnp.sum(x > 0)
        """,
    ),
    "JT202": (
        """
        a f32[8], x bf16[16,8] => jnp.tanh(x * a)
        a f32[8], x bf16[16,8] => x + a
        a f32[], x bf16[16,8] => x * a
        a f32[8,8], x bf16[16,8] => x @ a
        a f32[8,8], x bf16[16,8] => jnp.dot(x, a)
        a f32[8,8], x bf16[16,8] => jnp.einsum("ij,jk->ik", x, a)
        x bf16[16,8] => x * np.float32(0.5)
        x bf16[16,8] => x / np.float32(8)
        x bf16[16,8] => x + np.ones(8, np.float32)
        a f32[8], x f16[16,8] => x * a
        a f32[8], x bf16[16,8] => a - x
        a f32[8], x bf16[16,8] => jnp.maximum(x, a)
        a f32[16,1], x bf16[16,8] => x / a
        a f32[8], x bf16[16,8] => jax.jit(lambda x: x * a)(x)
        a f32[8], x bf16[16,8] => jax.vmap(lambda r: r * a)(x)
        x bf16[16,8] => jnp.exp(x * jnp.float32(2))
        a f32[8], x bf16[16,8] => lax.fori_loop(0, 2, lambda i, c: c + (x * a).sum(), 0.0)
        x bf16[16,8] => jnp.sin(x) * np.float32(3)
        a f32[8], x bf16[16,8] => (x + a) * 2
        a f32[4,8,8], x bf16[4,16,8] => x @ a
        a f32[8], x bf16[16,8] => jnp.power(x, a)
        """,
        """
        a bf16[8], x bf16[16,8] => jnp.tanh(x * a)
        a f32[8], x bf16[16,8] => jnp.tanh(x * a.astype(x.dtype))
        x bf16[16,8] => x * 0.5
        x bf16[16,8] => x.astype(jnp.float32) * np.float32(0.5)
        a f32[8], x bf16[16,8] => x.astype(jnp.float32) * a
        a f32[8], x f32[16,8] => x * a
        w f32[16,8], g bf16[16,8] => w - 0.1 * g
        a f32[8], x bf16[16,8] => (x * a).astype(x.dtype)
        a bf16[8,8], x bf16[16,8] => jnp.matmul(x, a, preferred_element_type=jnp.float32)
        x bf16[16,8] => x.astype(jnp.float32).mean()
        x bf16[16,8] => jnp.mean(x, dtype=jnp.float32)
        x bf16[16,8] => jnp.sin(x) + 1
        a f32[8], x bf16[8] => x + a
        a i32[8], x bf16[16,8] => x * a
        a f32[8,8], x bf16[16,8] => x @ a.astype(jnp.bfloat16)
        x bf16[16,8] => x * jnp.bfloat16(2)
        x bf16[16,8] => jax.nn.softmax(x.astype(jnp.float32))
        x f32[16,8] => x.astype(jnp.bfloat16) * 2
        a f32[32,8], x bf16[8] => x * a
        x bf16[16,8] => jnp.where(x > 0, x, 0)
        x bf16[16,8] => jnp.maximum(x, 0.0)
        """,
    ),
    "JT203": (
        """
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return y.astype(jnp.float32) * 2
        x f32[8,8] =>
            y = jnp.tanh(x).astype(jnp.float16)
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16).T
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16).reshape(-1)
            return y.astype(jnp.float32).sum()
        x f32[8,8] =>
            y = jnp.asarray(x, jnp.bfloat16)
            return jnp.asarray(y, jnp.float32) @ x
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            z = y.astype(jnp.float32)
            return z @ z.T
        x f32[8,8] =>
            y = lax.convert_element_type(x, jnp.float16)
            return lax.convert_element_type(y, jnp.float32) + 1
        x f32[8,8] =>
            y = jax.jit(lambda x: x.astype(jnp.bfloat16))(x)
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = jax.vmap(lambda r: r.astype(jnp.bfloat16))(x)
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)[None]
            return y.astype(jnp.float32).mean()
        x f32[8,8] =>
            y = (x @ x).astype(jnp.bfloat16)
            return jnp.exp(y.astype(jnp.float32))
        x f32[8,8] =>
            y = jnp.swapaxes(x.astype(jnp.float16), 0, 1)
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = jnp.broadcast_to(x.astype(jnp.bfloat16), (2, 8, 8))
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = jnp.flip(x.astype(jnp.bfloat16))
            return y.astype(jnp.float32)
        x f32[8] =>
            def step(c, t):
                y = jnp.stack([c, t]).astype(jnp.bfloat16)
                return y.astype(jnp.float32).sum(), None
            return lax.scan(step, 0.0, x)[0]
        x f32[8,8] =>
            y = jnp.bfloat16(x)
            return jnp.float32(y)
        x f32[8,8] =>
            half = x.astype("bfloat16")
            whole = half.astype("float32")
            return jax.nn.softmax(whole)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            y = jnp.squeeze(y[None], 0)
            return y.astype(jnp.float32) / 3
        x f32[8,8] =>
            y = jnp.sin(x).astype(jnp.float16)
            return jnp.cos(y.astype(jnp.float32))
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return jnp.where(x > 0, y.astype(jnp.float32), 0.0)
        x bf16[8,8] =>
            y = x.astype(jnp.float8_e4m3fn)
            return y.astype(jnp.bfloat16)
        """,
        """
        x f32[8,8] => x.astype(jnp.bfloat16).astype(jnp.float32)
        x f32[8,8] => x.astype(jnp.bfloat16)
        x bf16[8,8] =>
            y = x.astype(jnp.float32)
            return y.astype(jnp.bfloat16)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return y.astype(jnp.float32), y
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return (y @ y).astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            z = jnp.tanh(y)
            return z.astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.int32)
            return y.astype(jnp.float32)
        x f32[] =>
            y = x.astype(jnp.bfloat16)
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = jax.lax.reduce_precision(x, 8, 7)
            return y * 2
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return y.astype(jnp.float32) + (y * y).astype(jnp.float32)
        x i32[8,8] =>
            y = x.astype(jnp.int8)
            return y.astype(jnp.int32)
        x bf16[8,8] =>
            y = x.astype(jnp.float32) * 2
            return y.astype(jnp.bfloat16)
        x f32[8,8] =>
            y = x > 0
            return y.astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return y.sum().astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.float32)
            return y.astype(jnp.float32)
        x f32[8,8] =>
            q = jnp.round(x * 127).astype(jnp.int8)
            return q.astype(jnp.float32) / 127
        x f32[8,8], w bf16[8,8] =>
            y = x.astype(jnp.bfloat16)
            z = y @ w
            return z.astype(jnp.float32)
        x f16[8,8] =>
            y = x.astype(jnp.bfloat16)
            return y.astype(jnp.float32)
        x f32[8,8] => jnp.matmul(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        x f32[8,8] => jax.nn.softmax(x.astype(jnp.bfloat16)).astype(jnp.float32)
        x f32[8,8] =>
            y = x.astype(jnp.bfloat16)
            return y[0].astype(jnp.float32), y[1]
        """,
    ),
    "JT301": (
        """
        x f32[8], u f32[256] => jnp.sin(x)
        u f32[16,16], x f32[8] => x.sum()
        p {'w': f32[16,16], 'b': f32[16,16]}, x f32[16] => (p["w"] @ x).sum()
        x f32[8], u f32[256] => jax.jit(lambda x, u: x * 2)(x, u)
        x f32[8], u f32[256] => x + u.shape[0]
        x f32[8], u f32[256] => jnp.zeros_like(u)[:8] + x
        x f32[8], u f32[256] => x * u.ndim
        x f32[8], u f32[256] => lax.scan(lambda c, t: (c + t, None), 0.0, x)[0]
        x f32[8], u f32[256] =>
            u = jnp.sin(u)
            return x
        x f32[8], u f32[256] => lax.cond(x[0] > 0, lambda x, u: x, lambda x, u: 2 * x, x, u)
        x f32[8], u f32[256], v f32[256] => x + v[:8]
        x f32[8], u bf16[512] => x * 2
        x f32[8], u f32[16,16], m bool[8] => jnp.where(m, x, 0)
        x f32[8], u c64[256] => x - 1
        x f32[8], u f32[256] => jax.vmap(lambda t: t * 2)(x)
        x f32[8], u f32[256] => jax.checkpoint(lambda x, u: jnp.sin(x))(x, u)
        x f32[8], u f32[256] => lax.fori_loop(0, 2, lambda i, c: (c[0] * 2, c[1]), (x, u))[0]
        x f32[8], u f32[256] => jax.grad(lambda x: jnp.sin(x).sum())(x)
        x f32[8], u f32[256] => (u * 0).astype(jnp.int32).size + x
        p {'w': f32[16,16], 'b': f32[16,16]}, x f32[16] => jax.grad(lambda w: (w @ x).sum())(p["w"])
        x f32[8], u f32[1,256] => x.reshape(2, 4)
        """,
        """
        x f32[8], u f32[256] => x + u[:8]
        x f32[8], u f32[8] => jnp.sin(x)
        x f32[8], u i32[512] => jnp.sin(x)
        x f32[8], k key(0) => jnp.sin(x)
        x f32[8], u f32[] => jnp.sin(x)
        x f32[8], u bool[4096] => jnp.sin(x)
        s {'w': f32[16,16], 'b': f32[16,16]}, x f32[16] => s["w"] @ x
        x f32[8], u f32[256] => (x, u)
        x f32[8], u f32[256] => x * (u > 0).any()
        x f32[8], u f32[256] => x + u.astype(jnp.int32)[0]
        x f32[8], u f32[256] =>
            jax.debug.print("{}", u)
            return x
        x f32[8], u f32[256] => lax.cond(x[0] > 0, lambda x, u: x, lambda x, u: x + u[:8], x, u)
        x f32[8], u f32[256] => x[jnp.argmax(u) % 8]
        x f32[256] => jnp.sin(x)
        x f32[8], u f32[256] => jax.grad(lambda u: u.sum())(u) + x[0]
        x f32[8], u f32[256] => lax.stop_gradient(u).sum() + x
        x f32[8], u f32[256] => lax.fori_loop(0, 2, lambda i, c: c + u[i], x)
        x f32[8], u f32[250] => x * 2
        x f32[8], u bf16[500] => x * 2
        u f32[256] => jnp.zeros(3)
        x f32[8], u f32[256] => jnp.concatenate([x, u])
        """,
    ),
    "JT302": (
        """
        x f32[16,16] =>
            y = x @ x
            return x.sum()
        x f32[16,16] =>
            y = jnp.exp(x @ x.T)
            return jnp.sin(x)
        x f32[16,16] =>
            y = jnp.tanh(x @ x)
            y = jnp.sin(x)
            return y
        x f32[64,64] =>
            total = x.sum()
            return x * 2
        x f32[16,16] =>
            jnp.linalg.norm(x @ x)
            return x
        x f32[64,64] =>
            z = jnp.sort(x)
            return x
        x f32[16,16] =>
            loss = jnp.square(x @ x).mean()
            return (x * 2).sum()
        x f32[64,64] =>
            x.at[0].add(1.0).sum()
            return x
        x f32[16,16] =>
            y = jax.vmap(lambda r: x @ r)(x)
            return x
        x f32[16,16] =>
            y = jax.jit(lambda x: x @ x)(x)
            return x
        x f32[16,16] =>
            y = lax.fori_loop(0, 3, lambda i, c: c @ x, x)
            return x
        x f32[16,16] =>
            a = x @ x
            b = a @ x
            return x
        x f32[64,64] =>
            m, v = x.mean(0), x.var(0)
            return x
        x f32[64,64] =>
            y = jax.nn.softmax(x)
            return jnp.argmax(x, -1)
        x f32[16,16], w f32[16,16] =>
            q, k = x @ w, x @ w.T
            return x
        x f32[64,64] =>
            y = jnp.cumsum(x, 0)
            return x + 1
        x f32[16,16] =>
            y = jnp.einsum("ij,jk->ik", x, x)
            return x
        x f32[64,64] =>
            y = (x > 0).sum()
            return x
        x f32[16,16] =>
            y = [x @ x for _ in range(3)]
            return x
        x f32[64,64] =>
            y = jnp.where(x > 0, jnp.log(x), 0)
            return x
        x f32[16,16] =>
            h = lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)
            return x
        """,
        """
        x f32[16,16] => (x @ x).sum()
        x f32[16,16] =>
            y = x @ x
            return x.sum() + y.max()
        x f32[4] =>
            y = x * 2
            return x
        x f32[16,16] =>
            y = x @ x
            jax.debug.print("{}", y)
            return x
        x f32[16,16] => jax.grad(lambda x: jnp.sin(x @ x).sum())(x)
        x f32[16,16] => jax.value_and_grad(lambda x: jnp.sin(x @ x).sum())(x)
        x f32[64,64] =>
            y = x.T
            return x
        x f32[64,64] =>
            y = x.reshape(-1)
            return x
        x f32[64,64] =>
            y = jnp.zeros((64, 64))
            return x
        x f32[16,16] =>
            q, r = jnp.linalg.qr(x)
            return q
        x f32[64,64] =>
            value, index = lax.top_k(x, 2)
            return value
        x f32[16,16] =>
            y, z = x @ x, 3
            return y
        x f32[16,16] =>
            outs = lax.scan(lambda c, r: (c + r, x @ r), x[0], x)
            return outs[0]
        x f32[16,16], k key(0) =>
            a, b = random.split(k)
            return random.normal(a, (16, 16)) + x
        x f32[16,16] =>
            y = x @ x if False else x
            return y
        x f32[16,16] => {"a": x @ x, "b": x}
        x f32[64,64] =>
            n = x.shape[0] * x.size
            return x * n
        x f32[16,16] => jax.vjp(lambda x: x @ x, x)[1](x)
        x f32[16,16] => jax.jvp(lambda x: jnp.sin(x), (x,), (x,))[1]
        x f32[8,8] =>
            mean = x.mean()
            return x
        x f32[16,16] =>
            y = jax.checkpoint(lambda x: x @ x)(x)
            return y
        """,
    ),
    "JT303": (
        """
        *x f32[8] => x.sum()
        *x f32[8] => x.astype(jnp.bfloat16)
        *x f32[8] => x[:4]
        *x f32[8,4] => x @ x.T
        *x f32[8], y f32[4] => y + x[0]
        *x f32[8], *y f32[8] => x + y
        *x i32[8] => x.astype(jnp.float32).sum()
        *x f32[8] => jnp.concatenate([x, x])
        *x f32[8] => jnp.argmax(x)
        *x f32[8] => x > 0
        *x f32[8], y f32[8] => (x * y).sum()
        *x f32[8] => jnp.outer(x, x)
        *p {'w': f32[8], 'b': f32[4]}, x f32[8] => p["w"] * x + p["b"].sum()
        *x f32[8], y f32[3] => y
        *x f32[4,4] => jnp.linalg.norm(x, axis=0)
        *x f32[8] => x.astype(jnp.int8)
        *x f32[8] => {"mean": x.mean(), "max": x.max()}
        *x f32[8] => jnp.pad(x, 2)
        *x f32[8,4], y f32[8] => x.sum(1) * y
        *x bf16[8] => x.astype(jnp.float32)
        *x f32[8] => lax.scan(lambda c, t: (c + t, None), 0.0, x)[0]
        """,
        """
        *x f32[8] => x + 1
        *x f32[8] => (x * 2, x.sum())
        *x f32[8], *y f32[8] => (x + y, x - y)
        x f32[8] => x.sum()
        *p {'w': f32[8], 'b': f32[4]}, x f32[8] => {"w": p["w"] * x, "b": p["b"] * 2}
        *x f32[8], y f32[8] => x * y
        *x f32[8] => jnp.sort(x)
        *x f32[8] => x.at[0].set(1.0)
        *x f32[8,4] => jnp.tanh(x)
        *x i32[8] => x * 2
        *x f32[8] => lax.fori_loop(0, 3, lambda i, c: c * 2, x)
        *x f32[8] => jnp.where(x > 0, x, 0)
        *x f32[8], *k f32[2] => (x * k[0], k + 1)
        *x f32[8] => jax.grad(lambda x: jnp.sin(x).sum())(x)
        *x bf16[8] => x * 2
        *x f32[8,8] => x @ x
        *x f32[8] => jnp.flip(x)
        *x f32[8] => jnp.cumsum(x)
        *x f32[8], y f32[4] => (x + y.sum(), y)
        *x c64[8] => x * 2j
        *x f32[8] => lax.dynamic_update_slice(x, x[:2] * 2, (0,))
        """,
    ),
    "JT304": (
        """
        +s {'w': f32[1024,1024], 'm': f32[1024,1024]}, x f32[1024] =>
            g = jax.grad(lambda w: jnp.square(x @ w).mean())(s["w"])
            m = 0.9 * s["m"] + g
            return {"w": s["w"] - 0.1 * m, "m": m}
        +p {'a': f32[1024,1024], 'b': f32[1024]}, m {'a': f32[1024,1024], 'b': f32[1024]} =>
            m = jax.tree.map(lambda m, p: 0.9 * m + jnp.sin(p), m, p)
            return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m
        +c {'k': f32[1024,512], 'v': f32[1024,512]}, i i32[], x f32[512] =>
            return {"k": c["k"].at[i].set(x), "v": c["v"].at[i].set(2 * x)}
        +c {'k': f32[1024,512], 'v': f32[1024,512]}, x f32[1024,512] =>
            return jax.tree.map(lambda c: c + x, c), x.sum()
        +s {'w': f32[1024,512], 'n': i32[]}, x f32[1024,512] => {"w": s["w"] * 2 - x, "n": s["n"] + 1}
        +s {'w': f32[1024,512], 'v': f32[1024,512]}, n i32[] =>
            return lax.fori_loop(0, n, lambda i, s: {"w": s["w"] + s["v"], "v": s["v"] * 0.9}, s)
        +s {'w': f32[1024,512], 'v': f32[1024,512]}, ok bool[] =>
            return jax.tree.map(lambda s: jnp.where(ok, s * 2, s), s)
        +s {'w': bf16[1024,1024], 'v': bf16[1024,1024]}, x f32[1024,1024] =>
            return {"w": (s["w"].astype(jnp.float32) + x).astype(jnp.bfloat16), "v": s["v"] * 2}
        +s {'w': f32[1024,512], 'v': f32[1024,512]} => jax.jit(lambda s: jax.tree.map(jnp.tanh, s))(s)
        +p {'w': f32[1024,512], 'b': f32[512]}, q {'w': f32[1024,512], 'b': f32[512]} =>
            mix = jax.tree.map(lambda p, q: p + 0.1 * q, p, q)
            return mix, jax.tree.map(lambda q, p: q * 2 + p, q, p)
        +p {'w': f32[1024,512], 'b': f32[512]}, x f32[1024,512] => {"w": p["w"] + x, "b": p["b"] * 2}
        +p {'w': f32[1024,512], 'b': f32[512]}, n i32[] => n, jax.tree.map(lambda p: p / n, p)
        +p {'w': f32[1024,512], 'b': f32[512]} => {"params": jax.tree.map(jnp.abs, p), "norm": 1.0}
        +p {'w': f32[1024,512], 'v': f32[1024,512]} =>
            return lax.scan(lambda p, _: (jax.tree.map(jnp.sin, p), None), p, length=5)[0]
        +p {'w': i32[1024,512], 'v': i32[1024,512]} => jax.tree.map(lambda p: p + 1, p)
        +p {'w': f32[1024,512], 'v': f32[1024,512]}, x f32[9] =>
            return {"w": lax.dynamic_update_slice(p["w"], x[None], (3, 4)), "v": p["v"] + 1}
        +p {'w': f32[1024,512], 'b': f32[512]}, s f32[] =>
            return jax.vmap(lambda w: w * s)(p["w"]), {"w": p["w"] * s, "b": p["b"]}
        +s {'w': f32[1024,512], 'v': f32[1024,512]}, m bool[1024,512] =>
            return {"w": jnp.where(m, s["v"], s["w"]), "v": jnp.where(m, s["w"], s["v"])}
        +s {'w': f32[1024,512], 'v': f32[1024,512]}, x f32[1024,512] =>
            return jax.checkpoint(lambda s: jax.tree.map(lambda w: jnp.maximum(w, x), s))(s)
        +s {'w': c64[1024,512], 'v': c64[1024,512]} => jax.tree.map(lambda w: w * 1j, s)
        +s {'w': f32[1024,512], 'v': f32[1024,512]}, n i32[] =>
            return lax.while_loop(lambda s: s["w"][0, 0] < 9, lambda s: jax.tree.map(jnp.exp, s), s)
        """,
        """
        +p {'w': f32[1024,1024], 'b': f32[1024]}, x f32[8,1024] =>
            return jax.grad(lambda p: jnp.square(x @ p["w"] + p["b"]).mean())(p)
        +p {'w': f32[1024,1024], 'b': f32[1024]}, x f32[8,1024] =>
            g = jax.grad(lambda p: jnp.square(x @ p["w"] + p["b"]).mean())(p)
            return jax.tree.map(lambda g: jnp.clip(g, -1, 1), g)
        +p {'w': f32[1024,512], 'b': f32[512]}, m {'w': f32[1024,512], 'b': f32[512]} =>
            return jax.tree.map(lambda p, m: 0.9 * m + 0.1 * p, p, m)
        +x f32[1024,1024] => jnp.sin(x)
        p {'w': f32[1024,512], 'b': f32[512]} => jax.tree.map(lambda p: p * 2, p)
        *p {'w': f32[1024,512], 'b': f32[512]} => jax.tree.map(lambda p: p * 2, p)
        +p {'w': f32[64,64], 'b': f32[64]} => jax.tree.map(lambda p: p * 2, p)
        +p {'w': f32[1024,512], 'b': f32[512]} => jax.tree.map(lambda p: p.astype(jnp.bfloat16), p)
        +p {'w': f32[1024,512], 'b': f32[512]} => {"w": p["w"].T * 2, "b": p["b"]}
        +p {'w': f32[1024,512], 'b': f32[512]} => {"weight": p["w"] * 2, "bias": p["b"]}
        +p {'w': f32[512,512], 'b': f32[512,512]} => {"w": p["w"] @ p["b"], "b": p["b"] @ p["w"]}
        +p {'w': f32[1024,512], 'b': f32[512]} => jax.tree.map(lambda p: p.sum(), p)
        +p {'w': f32[1024,512], 'b': f32[512]} => jax.tree.map(lambda p: jnp.zeros_like(p), p)
        +p {'w': f32[1024,1024]} => {"w": jnp.linalg.cholesky(p["w"])}
        +p {'w': f32[1024,512], 'b': f32[512]}, q {'w': f32[1024,512], 'b': f32[512]} =>
            return jax.tree.map(lambda p, q: p + q, p, q)
        +p {'w': f32[1024,512], 'b': f32[512]} => {"w": p["w"] * 2}
        +p {'w': f32[1024,512], 'b': f32[512]} => {"w": p["w"] * 2, "b": p["b"], "c": 1.0}
        +p {'w': f32[1024,512], 'b': f32[512]}, x f32[512] =>
            return jax.vjp(lambda p: p["w"] @ p["b"] * x.sum(), p)[1](jnp.ones(1024))
        +p {'w': f32[1024,512], 'b': f32[512]} => jax.jacrev(lambda p: (p["w"] @ p["b"]).sum())(p)
        +p {'w': f32[1024,1024], 'b': f32[1024]}, x f32[8,1024] =>
            return jax.value_and_grad(lambda p: jnp.square(x @ p["w"] + p["b"]).mean())(p)
        +p {'w': f32[512,512], 'b': f32[512,512]} => jax.tree.map(lambda p: p.T + 1, p)
        """,
    ),
    "JT401": (
        """
        x f32[64,16] => x[jnp.arange(8, 40)]
        x f32[64,16] => x[jnp.arange(0, 64, 2)]
        x f32[64,16] => x[jnp.arange(63, -1, -1)]
        x f32[64,16] => x[jnp.arange(62, 1, -3)]
        x f32[64,16] => x[np.arange(20, 60)]
        x f32[64,16] => jnp.take(x, jnp.arange(32), axis=0)
        x f32[16,64] => x[:, jnp.arange(4, 40)]
        x f32[16,64] => jnp.take(x, np.arange(0, 64, 2), axis=1)
        x f32[64,16] => x[64 - 1 - jnp.arange(64)]
        x f32[64,16] => x[2 * jnp.arange(32) + 1]
        x f32[64,64] => x[jnp.arange(32)[:, None], jnp.arange(32)[None, :]]
        x f32[64,64] => x[np.ix_(range(32), range(0, 64, 2))]
        x f32[8,8,64] => x[:, :, jnp.arange(32)]
        x f32[64,16] => x[np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18])]
        x f32[64,16] => x[jnp.arange(64)[10:50]]
        x f32[64,16] => x[jnp.arange(64)[::-1]]
        x f32[64,16] => jax.jit(lambda x: x[jnp.arange(32)])(x)
        x f32[64,16] => x.at[jnp.arange(32)].get()
        x f32[64,16] => x[jnp.flip(jnp.arange(64))]
        x f32[64,16] => x[(jnp.arange(32) + 16).astype(jnp.int32)]
        x f32[1024] => x[np.arange(512)]
        x f32[64,16] => x[-jnp.arange(1, 33)]
        """,
        """
        x f32[64,16] => x[8:40]
        x f32[64,16] => x[::2]
        x f32[64,16] => x[::-1]
        x f32[64,16] => jnp.flip(x, 0)
        x f32[64,16], i i32[32] => x[i]
        x f32[64,16] => x[np.array([0, 1, 3] * 12)]
        x f32[64,16] => x[np.zeros(32, int)]
        x f32[64,16] => x[jnp.arange(32) ** 2 % 64]
        x f32[64,64] => x[jnp.arange(64), jnp.arange(64)]
        x f32[64,16], s i32[] => x[s + jnp.arange(32)]
        x f32[64,16] => x[jnp.argsort(x[:, 0])]
        x f32[64,16] => x[jnp.arange(4)]
        x f32[64,16] => x[(jnp.arange(64) + 8) % 64]
        x f32[64,16] => jnp.roll(x, 3, 0)
        x f32[64,16] => x[np.random.RandomState(0).permutation(64)]
        x f32[64,16] => x[np.repeat(np.arange(32), 2)]
        x f32[64,16] => x[np.tile(np.arange(32), 2)]
        x f32[64,16] => lax.dynamic_slice_in_dim(x, 3, 32)
        x f32[64,16] => jnp.take_along_axis(x, jnp.argsort(x, 0), 0)
        x f32[64,16] => jax.vmap(lambda i: x[i])(jnp.array([5, 3, 9, 1] * 8))
        x f32[64,16], m bool[64] => x[jnp.where(m, jnp.arange(64), 0)]
        x f32[64,16] => x[jnp.arange(48, 80)]
        """,
    ),
    "JT402": (
        """
        x f32[64,8], c i32[64] => x.at[jnp.arange(64), c % 8].add(1.0)
        x f32[64,8], k i32[64] => jnp.zeros_like(x).at[jnp.argsort(k)].set(x)
        x f32[64,8] => x.at[jnp.arange(0, 64, 2)].set(0.0)
        x f32[64,8] => x.at[jnp.arange(63, -1, -1)].mul(2.0)
        x f32[64,8], k key(0) => x.at[random.permutation(k, 64)].set(x)
        x f32[64] => jnp.zeros(64).at[jnp.argsort(x)].set(x)
        x f32[64] => jnp.zeros(64, jnp.int32).at[jnp.argsort(x)].set(jnp.arange(64))
        x f32[64,8] => x.at[np.random.RandomState(0).permutation(64)].add(1.0)
        x f32[64,8] => x.at[np.array([3, 1, 2] + list(range(10, 50)))].add(1.0)
        x f32[64,64] => x.at[jnp.arange(64), jnp.arange(64)].set(0.0)
        x f32[64,64] => x.at[jnp.diag_indices(64)].add(1.0)
        x f32[64,64] => x.at[np.tril_indices(16)].set(0.0)
        x f32[64,8], c i32[64] => x.at[jnp.arange(64), c].max(0.0)
        x f32[64], o i32[64] => jnp.zeros(128).at[jnp.argsort(o) + 3].set(x)
        x f32[64] => jnp.zeros(64).at[jnp.argsort(-x)[:48]].set(1.0)
        x f32[64] => jnp.zeros(64).at[jax.lax.top_k(x, 40)[1]].set(1.0)
        x f32[8,64] => jnp.zeros((8, 64)).at[jnp.arange(8)[:, None], jnp.argsort(x)].set(x)
        x f32[8,64] => jnp.zeros((8, 64)).at[jnp.arange(8)[:, None], jax.lax.top_k(x, 40)[1]].set(1.0)
        x f32[64,8] => x.at[2 * jnp.arange(32) + 1].add(1.0)
        x f32[64] => jnp.zeros(64).at[jnp.argsort(jnp.argsort(x))].add(x)
        x f32[64,8] => x.at[jnp.flip(jnp.arange(64))].set(x)
        s f32[64,8], y i32[64] => jax.grad(lambda s: s[jnp.arange(64), y].sum())(s)
        """,
        """
        x f32[64,8], i i32[64] => x.at[i].add(1.0)
        x f32[64,8] => x.at[jnp.arange(64)].add(1.0, unique_indices=True)
        x f32[64,8] => x.at[8:40].add(1.0)
        x f32[64,8] => x.at[::2].set(0.0)
        x f32[64,8], k i32[64] => jnp.zeros_like(x).at[jnp.argsort(k)].set(x, unique_indices=True)
        x f32[64,8] => x.at[np.array([0, 0, 1] * 20)].add(1.0)
        x f32[64,8] => x.at[jnp.arange(64) // 2].add(1.0)
        x f32[64,8] => x.at[jnp.arange(64) % 8].add(1.0)
        x f32[64] => jnp.zeros(8).at[jnp.argsort(x) // 8].add(x)
        x f32[64] => jnp.zeros(8).at[jnp.argsort(x) % 8].add(x)
        x f32[8,64] => jnp.zeros(64).at[jnp.argsort(x)].add(x)
        x f32[64,8] => x.at[0].set(1.0)
        x f32[64,8] => x.at[jnp.arange(8)].set(1.0)
        x f32[64], i i32[64] => jnp.zeros(64).at[jnp.sort(i)].add(x)
        x f32[64] => jnp.zeros(64).at[jnp.nonzero(x > 0, size=64)[0]].add(1.0)
        x f32[64], k key(0) => jnp.zeros(64).at[random.randint(k, (64,), 0, 64)].add(x)
        x f32[64], k key(0) => jnp.zeros(64).at[random.choice(k, 64, (64,))].add(x)
        x f32[64], b i32[64] => jax.ops.segment_sum(x, b, 8)
        x f32[64], i i32[64] => jnp.bincount(i, length=8)
        x f32[64,8], i i32[64] => jax.grad(lambda x: x[i].sum())(x)
        x f32[64], i i32[64] => jnp.zeros(64).at[jnp.cumsum(i)].set(x)
        x f32[4,64] => jnp.zeros((4, 64)).at[jnp.arange(4)[:, None] // 2, jnp.argsort(x)].add(x)
        """,
    ),
    "JT403": (
        """
        x f32[8,64] => jnp.sort(x)[:, -5:]
        x f32[8,64] => jnp.sort(x)[:, :5]
        x f32[64] => jnp.sort(x)[0]
        x f32[64] => jnp.sort(x)[-1]
        x f32[64] => jnp.argsort(x)[:8]
        x f32[64] => jnp.argsort(x)[::-1][:8]
        x f32[64] => jnp.argsort(-x)[:8]
        x f32[8,64] => jnp.argsort(x, descending=True)[:, :4]
        x f32[8,64] => jnp.sort(x, axis=-1)[..., -1]
        x f32[64,8] => jnp.sort(x, axis=0)[:3]
        x f32[64] => jnp.sort(x)[-8:].mean()
        x f32[64] => x[jnp.argsort(x)[-8:]]
        x f32[64] => jnp.flip(jnp.sort(x))[:8]
        x f32[64] => jnp.sort(x, descending=True)[:8]
        x f32[64] => lax.sort(x)[:10]
        x f32[64], y f32[64] => lax.sort((x, y), num_keys=1)[1][:10]
        x f32[8,64] => jax.vmap(lambda r: jnp.sort(r)[:4])(x)
        x f32[64] => jax.jit(lambda x: jnp.sort(x)[-3:])(x)
        x f32[64] => jnp.sort(x)[-16]  if False else jnp.sort(x)[-16:]
        x i32[64] => jnp.sort(x)[:16]
        x f32[64] => jnp.sort(jnp.abs(x))[-4:].sum()
        """,
        """
        x f32[64] => jnp.sort(x)
        x f32[64] => jnp.sort(x)[:32]
        x f32[64] => jnp.median(x)
        x f32[64] => jnp.sort(x)[::4]
        x f32[64] => lax.top_k(x, 5)[0]
        x f32[16] => jnp.sort(x)[:2]
        x f32[64] => jnp.argsort(jnp.argsort(x))
        x f32[64] => jnp.sort(x)[20:30]
        x f32[64], k i32[] => jnp.sort(x)[k]
        x f32[64] => (jnp.sort(x)[:4], jnp.sort(x).sum())
        x f32[64] => jnp.quantile(x, 0.9)
        x f32[64] => jnp.unique(x, size=64)
        x f32[64] => jnp.cumsum(jnp.sort(x))[-1]
        x f32[8,64] => jnp.sort(x)[0]
        x f32[8,64] => jnp.sort(x, axis=-1)[:2]
        x f32[64] => jnp.searchsorted(jnp.sort(x), 0.0)
        x f32[64] => jnp.sort(x)[-40:]
        x f32[64] => jnp.sort(x)[jnp.array([0, 63])]
        x f32[64] => jnp.min(x) + jnp.max(x)
        x f32[64] => jnp.diff(jnp.sort(x))
        x f32[64] => jnp.percentile(x, jnp.array([5.0, 95.0]))
        """,
    ),
    "JT404": (
        """
        x f32[8] => x[(jnp.indices((50000, 50000))[0] * 50000) % 8]
        x f32[8] =>
            i, j = jnp.indices((50000, 50000))
            return (i * 50000 + j).astype(jnp.float32)
        x f32[8] => jnp.arange(100) * 50_000_000
        x f32[8] => 2 ** jnp.arange(40)
        x f32[8] => 2 ** jnp.indices((32,))
        x f32[8] => jnp.arange(60000)[:, None] * 60000 + jnp.arange(60000)
        x f32[70000] => jnp.argmax(x) * 70000
        x f32[70000] => jnp.argsort(x) * 40000
        x f32[8] => jnp.arange(3000) ** 3
        x f32[8] => jnp.prod(jnp.array([50000, 50000]))
        x f32[8] => jnp.arange(50000) * jnp.arange(50000)
        x f32[8] => jnp.square(jnp.arange(50000))
        x f32[8] => lax.iota(jnp.int32, 70000) * 70000 // 70000
        x f32[8] => jnp.arange(0, 2**30, 2**20) * 4
        x f32[8] => (jnp.arange(100) + 2_147_483_600)
        x f32[8] => -jnp.arange(70000) * 70000
        x f32[8] => jnp.cumsum(jnp.full(100, 50_000_000))
        x f32[8] => jnp.sum(jnp.full(100, 50_000_000))
        x f32[8] => jnp.arange(300, dtype=jnp.int16) * 300
        x f32[8] => jnp.arange(100, dtype=jnp.int8) * 2
        x f32[8], i i32[4] => jnp.clip(i, 0, 99_999) * 100_000
        x f32[8] => jnp.cumprod(jnp.arange(1, 20))
        x f32[8] => jax.vmap(lambda i: i * 70000)(jnp.arange(70000))
        x f32[8] => jnp.dot(jnp.array([60000, 1]), jnp.array([60000, 1]))
        x f32[8] => jnp.left_shift(jnp.arange(1, 3), 31)
        """,
        """
        x f32[8] => x[(jnp.indices((500, 500))[0] * 500) % 8]
        x f32[8] => jnp.arange(100) * 20_000_000
        x f32[8] => 2 ** jnp.arange(31)
        x f32[8] => jnp.arange(70000) * 70000.0
        x f32[8] => jnp.arange(70000).astype(jnp.float32) * 70000
        x f32[8], i i32[4] => i * 70000
        x f32[8], i i32[4] => i * 50000 + i
        x f32[8] => (jnp.arange(70000) % 100) * 70000
        x f32[8] => jnp.where(jnp.arange(70000) < 100, jnp.arange(70000), 0) * 70000
        x f32[8] => jnp.arange(70000, dtype=jnp.uint32) * 70000
        x f32[8] => (jnp.arange(1000) * 73856093) ^ (jnp.arange(1000) * 19349663)
        x f32[8] => (jnp.arange(1000) * 73856093) & 1023
        x f32[8] => jnp.minimum(jnp.arange(70000), 100) * 70000
        x f32[8] => jnp.arange(70000) // 100 * 2000
        x f32[8] => jnp.unravel_index(jnp.arange(100), (10, 10))[0]
        x f32[8], k key(0) => random.randint(k, (8,), 0, 2**31 - 1)
        x f32[8] => jnp.arange(46340) ** 2
        x f32[8] => -jnp.arange(100) - 2_147_483_500
        x f32[8] => jnp.arange(100) * 50_000_000.0
        x f32[8] => jnp.iinfo(jnp.int32).max - jnp.arange(100)
        x f32[8] => jnp.cumsum(jnp.full(100, 20_000_000))
        x f32[8], k key(0) => random.permutation(k, 100)
        x f32[70000], i i32[4] => x[i]
        """,
    ),
    "JT501": (
        """
        x f32[8] =>
            for _ in range(70):
                x = jnp.sin(x) * 2 + 1
            return x
        w f32[50,4,4], x f32[4] =>
            for m in w:
                x = jnp.tanh(m @ x) + jnp.sin(x)
            return x
        x f32[8] =>
            for i in range(70):
                x = jnp.cos(x) - x * x
            return x
        x f32[70,4] =>
            h = jnp.zeros(4)
            for t in range(70):
                h = jnp.tanh(h + x[t])
            return h
        x f32[8] =>
            i = 0
            while i < 70:
                x = jnp.sin(x) + jnp.cos(x)
                i += 1
            return x
        x f32[8] =>
            ys = [jnp.sin(x * 2) + jnp.cos(x) for _ in range(70)]
            return sum(ys)
        x f32[8] =>
            total = 0.0
            for k in range(70):
                total += jnp.exp(-x * x).sum()
            return total
        x f32[60] =>
            out = []
            for i in range(60):
                out.append(jnp.sin(x[i]) * 2)
            return jnp.stack(out)
        x f32[8] =>
            f = lambda y: jnp.tanh(y) - 0.1 * y
            for _ in range(70):
                x = x + 0.1 * f(x)
            return x
        x f32[8] =>
            v = jnp.zeros(8)
            for _ in range(60):
                v = v - 0.1 * jnp.sin(x)
                x = x + 0.1 * v
            return x
        x f32[8] =>
            for _ in range(20):
                for _ in range(4):
                    x = jnp.sin(x) * 2 + 1
            return x
        x f32[8] => jax.jit(lambda x: [x := jnp.sin(x) * 2 + 1 for _ in range(80)][-1])(x)
        x f32[8] =>
            ys = {}
            for k in range(70):
                ys[k] = jnp.sin(x) * 2 + 1
            return sum(ys.values())
        x f32[8,4] =>
            def one(r):
                for _ in range(70):
                    r = jnp.sin(r) * 2 + 1
                return r
            return jax.vmap(one)(x)
        x f32[8] =>
            def loss(x):
                for _ in range(70):
                    x = jnp.sin(x) * 2 + 1
                return x.sum()
            return jax.grad(loss)(x)
        x f32[8] =>
            for _ in range(30):
                x = jax.nn.gelu(x)
            return x
        x f32[8,8] =>
            for _ in range(60):
                x = x @ x / jnp.linalg.norm(x)
            return x
        x f32[8] =>
            for k in range(1, 70):
                x = x * 0.5 + jnp.abs(x) / 3
            return x
        x f32[8] =>
            for _ in range(70):
                x = jnp.where(x > 0, x * 2, jnp.exp(x))
            return x
        x f32[8], t f32[70] =>
            for s in t:
                x = x + s * jnp.sin(x)
            return x
        """,
        """
        x f32[8] =>
            for _ in range(6):
                x = jnp.sin(x) * 2 + 1
            return x
        x f32[8] => lax.fori_loop(0, 70, lambda i, x: jnp.sin(x) * 2 + 1, x)
        x f32[70,4] => lax.scan(lambda h, r: (jnp.tanh(h + r), None), jnp.zeros(4), x)[0]
        x f32[8] => lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x)
        x f32[8] =>
            for _ in range(20):
                x = jnp.sin(x)
            return x
        x f32[70,4] => jax.vmap(jnp.tanh)(x)
        x f32[8] => jnp.sin(x) + jnp.cos(x)
        x f32[8] =>
            for i in range(40):
                y = i * 2
            return x * y
        x f32[8] => sum(x * i for i in range(10))
        x f32[8] =>
            for _ in range(7):
                x = jax.nn.gelu(jax.nn.softmax(x))
            return x
        x f32[70,4] => lax.map(lambda r: jnp.sin(r) * 2, x)
        x f32[8] => jnp.polyval(jnp.ones(30), x)
        x f32[8] => lax.fori_loop(0, 70, lambda i, x: jnp.sin(x) * 2 + 1, x, unroll=10)
        x f32[8] => functools.reduce(lambda a, b: a + b, [x * i for i in range(12)])
        x f32[64] => lax.associative_scan(jnp.add, x)
        x f32[8] =>
            for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp):
                x = f(x)
            return x
        x f32[8] =>
            while x.ndim < 3:
                x = x[None]
            return x
        x f32[8] => jnp.stack([jnp.roll(x, i) for i in range(4)])
        x f32[8] =>
            def step(c, _):
                for _ in range(3):
                    c = jnp.sin(c) * 2
                return c, None
            return lax.scan(step, x, None, length=50)[0]
        x f32[8] =>
            for _ in range(5):
                x = lax.fori_loop(0, 9, lambda i, x: jnp.sin(x), x)
            return x
        """,
    ),
    "JT502": (
        """
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h + r), jnp.zeros(64), x)[1][-1]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, jnp.sin(h)), jnp.zeros(64), x)[1][-1]
        x f32[9,64] =>
            h, ys = lax.scan(lambda h, r: (h + r, h * r), jnp.zeros(64), x)
            return h + ys[-1]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][8]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][-1:]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][-1].sum()
        x f32[64] => lax.scan(lambda h, _: (h * 2, h), x, None, length=7)[1][-1]
        x f32[64] => lax.scan(lambda h, i: (h * 2, h + i), x, jnp.arange(7.0))[1][6]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x, reverse=True)[1][0]
        x f32[9,64] => lax.map(jnp.sin, x)[-1]
        x f32[9,64] =>
            _, (a, b) = lax.scan(lambda h, r: (h + r, (h, h * r)), jnp.zeros(64), x)
            return a[-1] + b[-1]
        x f32[9,64] =>
            _, (a, b) = lax.scan(lambda h, r: (h + r, (h, h * r)), jnp.zeros(64), x)
            return a[-1], b
        x f32[9,64] => jax.jit(lambda x: lax.scan(lambda h, r: (h + r, h), x[0], x)[1][-1])(x)
        x f32[999,4] => lax.scan(lambda h, r: (h + r, (h * r).sum()), jnp.zeros(4), x)[1][-1]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x, unroll=3)[1][-1]
        x f32[9,64] => lax.slice_in_dim(lax.scan(lambda h, r: (h + r, h), x[0], x)[1], 8, 9)
        x f32[9,64] =>
            ys = lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1]
            return ys[-1] * ys[-1]
        x f32[9,16,4] => lax.scan(lambda h, r: (h + r, h @ r.T), jnp.zeros((16, 4)), x)[1][-1]
        x f32[9,64] => lax.scan(lambda h, r: (jnp.tanh(h + r), r * 2), jnp.zeros(64), x)[1][-1]
        x f32[9,64] => lax.cond(x[0, 0] > 0, lambda x: lax.scan(lambda h, r: (h + r, h), x[0], x)[1][-1], lambda x: x[0], x)
        """,
        """
        x f32[9,64] => lax.scan(lambda h, r: (h + r, None), jnp.zeros(64), x)[0]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][0]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][-2:]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1].sum(0)
        x f32[9,64] =>
            ys = lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1]
            return ys[-1], ys
        x f32[9,64], i i32[] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][i]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][:, -1]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x, reverse=True)[1][-1]
        x f32[1,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][-1]
        x f32[9,64] => jnp.cumsum(x, 0)[-1]
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][::2]
        x f32[9,64] => lax.map(jnp.sin, x)
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1].mean()
        x f32[9,64] => jax.grad(lambda x: lax.scan(lambda h, r: (jnp.sin(h + r), None), jnp.zeros(64), x)[0].sum())(x)
        x f32[9,64] => lax.fori_loop(0, 9, lambda i, h: h + x[i], jnp.zeros(64))
        x f32[9,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1][4]
        x f32[3,4] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(4), x)[1][-1]
        x f32[9,64] => jnp.diff(lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1], axis=0)
        x f32[9,64] => lax.associative_scan(jnp.add, x)[-1]
        x f32[0,64] => lax.scan(lambda h, r: (h + r, h), jnp.zeros(64), x)[1]
        """,
    ),
    "JT503": (
        """
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r))(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda: r @ w, lambda: r))(x)
        x f32[8,16], i i32[8], w f32[16,16] => jax.vmap(lambda r, k: lax.switch(k, [lambda r: r, lambda r: r @ w], r))(x, i)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: jnp.tanh(r @ w), lambda r: r @ w.T, r))(x)
        x f32[8,16], f bool[8], w f32[16,16] => jax.vmap(lambda r, f: lax.cond(f, lambda r: r @ w, lambda r: r, r))(x, f)
        x f32[8,16], w f32[16,16] => jax.jit(jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r)))(x)
        x f32[2,4,16], w f32[16,16] => jax.vmap(jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r)))(x)
        x f32[8,64] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: jnp.sort(r), lambda r: r, r))(x)
        x f32[8,16], w f32[16,16] =>
            def one(r):
                y = lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r)
                return y.sum()
            return jax.vmap(one)(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(jnp.all(r > 0), lambda r: r @ w @ w, lambda r: r, r))(x)
        x f32[16,8], w f32[16,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r), in_axes=1)(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: (r @ w, r), lambda r: (r, r @ w), r))(x)
        x f32[8,16], i i32[8], w f32[16,16] => jax.vmap(lambda r, k: lax.switch(k, [jnp.sin, jnp.cos, lambda r: r @ w], r))(x, i)
        x f32[8,4,4] => jax.vmap(lambda m: lax.cond(m[0, 0] > 0, lambda m: m @ m @ m @ m, lambda m: m, m))(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: lax.fori_loop(0, 3, lambda i, c: c @ w, r), lambda r: r, r))(x)
        x f32[8,16], w f32[16,16] => lax.scan(lambda c, b: (jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r))(c) + b, None), x, x[None])[0]
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: jnp.dot(r, w), lambda r: jnp.zeros(16), r))(x)
        x f32[8,16], w f32[8,16,16] => jax.vmap(lambda r, w: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r))(x, w)
        x f32[8,256] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: jnp.exp(jnp.sin(r)), lambda r: r, r))(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: jax.lax.cond(pred=r[0] > 0, true_fun=lambda r: r @ w, false_fun=lambda r: r, operand=None) if False else jax.lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r))(x)
        """,
        """
        x f32[8,16], w f32[16,16], f bool[] => jax.vmap(lambda r: lax.cond(f, lambda r: r @ w, lambda r: r, r))(x)
        x f32[16], w f32[16,16] => lax.cond(x[0] > 0, lambda r: r @ w, lambda r: r, x)
        x f32[8,16], w f32[16,16] => lax.map(lambda r: lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r), x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: jnp.where(r[0] > 0, r @ w, r))(x)
        x f32[8,16] => jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r, lambda r: -r, r))(x)
        x f32[8] => jax.vmap(lambda t: lax.cond(t > 0, jnp.sin, jnp.cos, t))(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: jnp.tanh(r @ w))(x)
        x f32[8,16] => jax.vmap(jax.nn.relu)(x)
        x f32[8,16] => jax.vmap(jnp.sort)(x)
        x f32[8,16], w f32[16,16] => jnp.where(x[:, :1] > 0, x @ w, x)
        x f32[8,16], i i32[], w f32[16,16] => jax.vmap(lambda r: lax.switch(i, [lambda r: r, lambda r: r @ w], r))(x)
        x f32[8,16], w f32[16,16] => lax.scan(lambda c, r: (c, lax.cond(r[0] > 0, lambda r: r @ w, lambda r: r, r)), 0, x)[1]
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.select(r > 0, r @ w, r))(x)
        x f32[8,16] => jax.vmap(jnp.linalg.norm)(x)
        x f32[8,16] => jax.vmap(lambda r: r[jnp.argmax(r)])(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(True, lambda r: r @ w, lambda r: r, r))(x)
        x f32[8,16] => jax.vmap(lambda r: jnp.clip(r, 0, 1))(x)
        x f32[8,16], w f32[16,16] => jax.vmap(lambda r: lax.cond(w[0, 0] > 0, lambda r: r @ w, lambda r: r, r))(x)
        x f32[8,16] => jax.vmap(lambda r: jnp.piecewise(r, [r < 0], [jnp.sin, jnp.cos]))(x)
        x f32[8,16] => jax.vmap(jnp.median)(x)
        """,
    ),
    "JT504": (
        """
        x f32[4], w f32[64,4,4] => lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w, unroll=64)[0]
        x f32[4], w f32[64,4,4] => lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w, unroll=True)[0]
        x f32[4] => lax.fori_loop(0, 60, lambda i, c: jnp.sin(c) * 2, x, unroll=True)
        x f32[4] => lax.fori_loop(0, 128, lambda i, c: jnp.sin(c) * 2, x, unroll=64)
        x f32[4], p f32[128] => jnp.polyval(p, x, unroll=128)
        x f32[4], w f32[100,4] => lax.scan(lambda c, r: (c * 2 + r, jnp.sin(c)), x, w, unroll=50)[1]
        x f32[4], w f32[40,4] => lax.scan(lambda c, r: (jnp.sin(c) * jnp.cos(r) + 1, None), x, w, unroll=40)[0]
        x f32[4], w f32[64,4] => jax.jit(lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), None), x, w, unroll=64)[0])(x)
        x f32[4], w f32[64,4] => lax.scan(lambda c, r: (jnp.tanh(c + r), None), x, w, unroll=64, reverse=True)[0]
        x f32[4], w f32[64,4] => jax.grad(lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), None), x, w, unroll=64)[0].sum())(x)
        x f32[8,4], w f32[64,4] => jax.vmap(lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), None), x, w, unroll=64)[0])(x)
        x f32[4] => lax.scan(lambda c, _: (jax.nn.gelu(c), None), x, None, length=32, unroll=32)[0]
        x f32[4] => lax.fori_loop(0, 30, lambda i, c: jax.nn.softmax(c) + c, x, unroll=30)
        x f32[4] => lax.fori_loop(0, 1000, lambda i, c: c * 0.5 + jnp.sin(c) / (1 + i), x, unroll=100)
        x f32[4], w f32[8,4] => lax.scan(lambda c, r: (lax.fori_loop(0, 64, lambda i, d: jnp.sin(d) * 2, c + r, unroll=True), None), x, w)[0]
        x f32[4] => lax.cond(x[0] > 0, lambda x: lax.fori_loop(0, 64, lambda i, d: jnp.sin(d) * 2, x, unroll=64), lambda x: x, x)
        x f32[4] => lax.scan(lambda c, k: (c + jnp.cos(k * c), None), x, jnp.arange(64.0), unroll=64)[0]
        x f32[4] => lax.fori_loop(0, 99, lambda i, c: jnp.where(c > i, c * 2, c), x, unroll=50)
        x f32[4] => jax.checkpoint(lambda x: lax.fori_loop(0, 64, lambda i, c: jnp.sin(c) * 2, x, unroll=64))(x)
        x f32[4], w f32[65,4] => lax.scan(lambda c, r: (jnp.tanh(c + r), c), x, w, unroll=60)[1]
        """,
        """
        x f32[4], w f32[64,4,4] => lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w)[0]
        x f32[4], w f32[64,4,4] => lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w, unroll=2)[0]
        x f32[4], w f32[64,4,4] => lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w, unroll=4)[0]
        x f32[4], w f32[64,4,4] => lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w, unroll=False)[0]
        x f32[4] => lax.fori_loop(0, 64, lambda i, c: jnp.sin(c) * 2, x)
        x f32[4] => lax.fori_loop(0, 4, lambda i, c: jnp.sin(c) * 2, x, unroll=True)
        x f32[4], p f32[128] => jnp.polyval(p, x)
        x f32[4], p f32[128] => jnp.polyval(p, x, unroll=4)
        x f32[4] => lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)
        x f32[64,4] => lax.map(jnp.sin, x)
        x f32[64,4] => jnp.cumsum(x, 0)
        x f32[64,4] => lax.associative_scan(jnp.add, x)
        x f32[4], w f32[7,4] => lax.scan(lambda c, r: (jnp.tanh(c + r), None), x, w, unroll=7)[0]
        x f32[4] => lax.fori_loop(0, 10, lambda i, c: c * 2, x, unroll=10)
        x f32[4], w f32[64,4] => lax.scan(lambda c, r: (c + r, None), x, w, unroll=8)[0]
        x f32[4] => lax.scan(lambda c, _: (jax.nn.gelu(c), None), x, None, length=32, unroll=1)[0]
        x f32[64,4] => jax.vmap(jnp.sin)(x)
        x f32[4], w f32[64,4] => jax.grad(lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), None), x, w)[0].sum())(x)
        x f32[8] => lax.fori_loop(0, 1, lambda i, c: jnp.sin(c), x, unroll=True)
        x f32[64,4] => lax.map(jnp.sin, x, batch_size=8)
        """,
    ),
    "JT505": (
        """
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1])
                return c, jnp.tanh(c @ tx[1])
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.concatenate([c[1:], x[None]]), x.sum())
            return lax.scan(step, jnp.zeros((256, 64)), xs)
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.concatenate([x[None], c[:-1]]), x.sum())
            return lax.scan(step, jnp.zeros((256, 64)), xs)
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.roll(c, -1, 0).at[-1].set(x), x.sum())
            return lax.scan(step, jnp.zeros((256, 64)), xs)
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.roll(c, 1, 0).at[0].set(x), x.sum())
            return lax.scan(step, jnp.zeros((256, 64)), xs)
        h f32[64], w f32[64,64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(jnp.tanh(c[tx[0] - 1] + tx[1]))
                return c, (c @ w).sum()
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[64], w f32[64,64], xs f32[256,64] =>
            def step(c, tx):
                h, c = c
                k = c @ w
                h = jnp.tanh(h + k.sum(0) + tx[1])
                return (h, c.at[tx[0]].set(h)), h
            return lax.scan(step, (h, jnp.zeros((256, 64))), (jnp.arange(256), xs))[1]
        h f32[64], w f32[64,64], xs f32[256,64] =>
            def step(c, tx):
                h, c = c
                h = jnp.tanh(h + jax.nn.softmax((c @ w) @ tx[1]) @ c)
                return (h, lax.dynamic_update_slice(c, h[None], (tx[0], 0))), h
            return lax.scan(step, (h, jnp.zeros((256, 64))), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = lax.dynamic_update_slice(c, tx[1][None], (tx[0], 0))
                return c, c.mean(0)
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1])
                return c, jnp.max(c)
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1])
                return c, jnp.linalg.norm(c @ tx[1])
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[8,64], xs f32[256,8,64] =>
            def step(c, tx):
                c = c.at[:, tx[0]].set(tx[1])
                return c, jnp.einsum("btd,bd->bt", c, tx[1])
            return lax.scan(step, jnp.zeros((8, 256, 64)), (jnp.arange(256), xs))[1]
        h f32[8,64], xs f32[256,8,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1])
                return c, jnp.einsum("tbd,bd->tb", c, tx[1])
            return lax.scan(step, jnp.zeros((256, 8, 64)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def f(xs):
                def step(c, tx):
                    c = c.at[tx[0]].set(tx[1])
                    return c, jax.nn.softmax(c @ tx[1]) @ c
                return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1].sum()
            return jax.grad(f)(xs)
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                n, c = c
                c = c.at[n].set(tx)
                return (n + 1, c), (c @ tx).sum()
            return lax.scan(step, (0, jnp.zeros((256, 64))), xs)[1]
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.concatenate([c[1:], x[None]], 0), c[0])
            return lax.scan(step, jnp.zeros((512, 64)), xs)
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.concatenate([c[:, 1:], x[:, None]], 1), x.sum())
            return lax.scan(step, jnp.zeros((64, 256)), xs)
        h f32[64], w f32[64,128], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1] + c.mean(0))
                return c, jnp.dot(c, w).sum()
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                h, c = c
                h = jnp.tanh(h + tx[1])
                c = c.at[tx[0]].set(h)
                return (h, c), jnp.where(jnp.arange(256) <= tx[0], c @ h, 0.0)
            return lax.scan(step, (h, jnp.zeros((256, 64))), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1].astype(jnp.bfloat16))
                return c, c.astype(jnp.float32) @ tx[1]
            return lax.scan(step, jnp.zeros((256, 64), jnp.bfloat16), (jnp.arange(256), xs))[1]
        """,
        """
        h f32[64], xs f32[256,64] => lax.scan(lambda h, x: (jnp.tanh(h + x), h), h, xs)[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1])
                return c, c[tx[0] - 1].sum()
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                h, c = c
                h = jnp.tanh(h + jax.nn.softmax(c @ tx[1]) @ c)
                return (h, c.at[tx[0]].set(h)), h
            return lax.scan(step, (h, jnp.zeros((256, 64))), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (jnp.concatenate([c[1:], x[None]]), c.sum())
            return lax.scan(step, jnp.zeros((4, 64)), xs)
        h f32[64], xs f32[8,64] =>
            step = lambda c, x: (jnp.concatenate([c[1:], x[None]]), c.sum())
            return lax.scan(step, jnp.zeros((8, 64)), xs)
        h f32[64], xs f32[256,64] => lax.scan(lambda c, x: (c, jax.nn.softmax(xs @ x) @ xs), 0, xs)[1]
        h f32[64], xs f32[256,64] => lax.map(lambda x: xs @ x, xs)
        h f32[64], w f32[64,64], xs f32[256,64] => lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), h, xs)[1]
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (c + jnp.outer(x, x), c @ x)
            return lax.scan(step, jnp.zeros((64, 64)), xs)[1]
        h f32[64], xs f32[256,64] =>
            step = lambda c, x: (c.at[0].set(x), x.sum())
            return lax.scan(step, jnp.zeros((256, 64)), xs)[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                return c.at[tx[0]].set(tx[1]), tx[1].sum()
            return lax.scan(step, jnp.zeros((256, 64)), (jnp.arange(256), xs))
        h f32[64], xs f32[256,2] =>
            def step(c, tx):
                c = c.at[tx[0]].set(tx[1])
                return c, c.mean(0)
            return lax.scan(step, jnp.zeros((256, 2)), (jnp.arange(256), xs))[1]
        h f32[64], xs f32[256,64] =>
            def step(c, tx):
                c = c.at[tx[0] % 16].set(tx[1])
                return c, c.mean(0)
            return lax.scan(step, jnp.zeros((16, 64)), (jnp.arange(256), xs))[1]
        h f32[64], k i32[256], xs f32[256,64] =>
            def step(c, kx):
                return c.at[kx[0]].add(kx[1]), kx[1].sum()
            return lax.scan(step, jnp.zeros((256, 64)), (k, xs))[0]
        h f32[64], w f32[64,64], xs f32[256,64] => lax.scan(lambda c, x: (jnp.tanh(c @ w), c[0]), xs, None, length=64)[1]
        h f32[64], xs f32[256,64] => lax.scan(lambda c, x: (jnp.roll(c, 1, 0), c[0]), xs, None, length=64)[1]
        h f32[64], xs f32[256,64] => jnp.tril(xs @ xs.T) @ xs
        h f32[64], xs f32[256,64] => lax.associative_scan(jnp.add, xs)
        h f32[64], xs f32[256,64] => lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.sort(c[1], 0)), (0, xs))
        h f32[64], xs f32[256,64] => jax.grad(lambda xs: lax.scan(lambda h, x: (jnp.tanh(h + x), h), h, xs)[1].sum())(xs)
        h f32[64], xs f32[256,64] => lax.fori_loop(0, 256, lambda i, c: c.at[i].set(jnp.tanh(xs[i])), jnp.zeros((256, 64)))
        """,
    ),
    "JT506": (
        """
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), c[i]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), c[7]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[3].set(1.0), c[i]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].add(1.0), c[i + 1]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].max(1.0), c[i]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].multiply(2.0), c.sum()), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(i * 2.0), jnp.argmax(c)), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), jnp.dot(c, c)), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), jnp.sort(c)[0]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), c[::2]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0).at[i + 1].set(2.0), c[i]), x, i)
        x f32[100,100], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), c[i]), x, i)
        x f32[100,100], i i32[100] => lax.scan(lambda c, i: (c.at[:, i].set(1.0), c.sum(0)), x, i)
        x i32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].add(1), c[i]), x, i)
        x f16[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1), c[i]), x, i)
        x f32[10000], i i32[100] =>
            def pop(c, i):
                value = c[i]
                rest = lax.dynamic_slice(c, (i + 1,), (100,))
                return lax.dynamic_update_slice(c, rest, (i,)), value
            return lax.scan(pop, x, i)
        x f32[10000], i i32[100] =>
            def step(carry, i):
                c, total = carry
                return (c.at[i].set(0.0), total + c[i]), None
            return lax.scan(step, (x, 0.0), i)[0]
        x f32[10000], i i32[100] =>
            def step(carry, i):
                c, h = carry
                return (c.at[i].set(h), jnp.tanh(h + c[i])), None
            return lax.scan(step, (x, 0.0), i)[0]
        x f32[10000], i i32[100] =>
            def step(c, i):
                old = c[(i + jnp.arange(5)) % 10000]
                return c.at[(i + jnp.arange(3)) % 10000].set(1.0), old
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            @jax.jit
            def step(c, i):
                return c.at[i].set(1.0), jnp.linalg.norm(c)
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            step = lambda c, i: (lax.dynamic_update_slice(c, jnp.ones(100) * i, (5,)), c[200])
            return lax.scan(step, x, i)
        x f32[10000], i i32[10] =>
            def outer(c, i):
                c, seen = lax.scan(lambda c, j: (c.at[j].set(1.0), c[j]), c, jnp.arange(20))
                return c, seen.sum()
            return lax.scan(outer, x, i)
        """,
        """
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), None), x, i)[0]
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].add(1.0), None), x, i)[0]
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), c[i]), x, i)[0]
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(c[i - 1] * 0.5), None), x, i)[0]
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(c.sum()), None), x, i)[0]
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c * 2 + 1, None), x, i)[0]
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (jnp.where(i % 2 == 0, c.at[i].set(1.0), c), None), x, i)[0]
        x f32[100], i i32[100] => lax.scan(lambda c, i: (c.at[i].set(1.0), c[i]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c, c[i]), x, i)
        x f32[10000], i i32[100] => lax.scan(lambda c, i: (c + x[i], c[0]), jnp.float32(0) + x[:1], i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                c = c.at[i].set(1.0)
                return c, c[i]
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                c = c.at[i].set(1.0)
                return c, c[i] + 1
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                total = c.sum()
                return c.at[i].set(total), total
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                total = jnp.dot(c, c)
                return c.at[i].set(total), total
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                k = jnp.argmax(c)
                return c.at[k].set(0.0), k
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                rest = lax.dynamic_slice(c, (i + 1,), (100,))
                return lax.dynamic_update_slice(c, rest, (i,)), None
            return lax.scan(step, x, i)[0]
        x f32[10000], i i32[100] =>
            def step(carry, i):
                c, h = carry
                h = jnp.tanh(h + c[i])
                return (c.at[i].set(h), h), None
            return lax.scan(step, (x, 0.0), i)[0]
        x f32[10000], i i32[100] =>
            def step(c, i):
                smallest = jnp.sort(c)[0]
                return c.at[i].set(smallest), smallest
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                value = lax.fori_loop(0, 3, lambda k, s: s + c[i + k], 0.0)
                return c.at[i].set(value), value
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                return lax.cond(i % 2 == 0, lambda c: c.at[i].set(1.0), lambda c: c, c), None
            return lax.scan(step, x, i)[0]
        x f32[10000], i i32[100] =>
            def step(c, i):
                c[i]
                return c.at[i].set(1.0), jnp.zeros_like(c)[0]
            return lax.scan(step, x, i)
        x f32[10000], i i32[100] =>
            def step(c, i):
                pair = lax.dynamic_slice(c, (i,), (2,))
                return lax.dynamic_update_slice(c, pair[::-1], (i,)), None
            return lax.scan(step, x, i)[0]
        """,
    ),
    "JT601": (
        """
        x f32[9] => lax.scan(lambda c, t: (c + t, jax.debug.print("{}", t)), 0.0, x)[0]
        x f32[4] =>
            def body(i, x):
                jax.debug.print("{}", i)
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[4] =>
            def body(x):
                jax.debug.print("{}", x)
                return x * 2
            return lax.while_loop(lambda x: x.sum() < 9, body, x)
        x f32[4] =>
            def body(i, x):
                return jax.pure_callback(np.sin, x, x)
            return lax.fori_loop(0, 9, body, x)
        x f32[9] => lax.scan(lambda c, t: (c + jax.pure_callback(np.cos, t, t), None), 0.0, x)[0]
        x f32[4] =>
            def body(i, x):
                jax.debug.callback(print, i)
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[4] =>
            def body(i, x):
                lax.cond(i % 3 == 0, lambda: jax.debug.print("{}", i), lambda: None)
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[4] =>
            def body(i, x):
                lax.cond(x[0] > 0, lambda: jax.debug.print("a"), lambda: jax.debug.print("b"))
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[9,4] => lax.map(lambda r: jax.pure_callback(np.sin, r, r), x)
        x f32[3,3] =>
            def row(c, r):
                return lax.scan(lambda c, t: (c + t, jax.debug.print("{}", t)), c, r)[0], None
            return lax.scan(row, 0.0, x)[0]
        x f32[4] =>
            def body(i, x):
                jax.jit(lambda x: jax.debug.print("{}", x))(x)
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[4] =>
            from jax.experimental import io_callback
            def body(i, x):
                io_callback(lambda x: None, None, x)
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[4] =>
            from jax.experimental import io_callback
            def body(i, x):
                io_callback(lambda x: None, None, x, ordered=True)
                return x * 2
            return lax.fori_loop(0, 9, body, x)
        x f32[4] => jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, x: (jax.debug.print("{}", i), x * 2)[1], x))(x)
        x f32[2,4] => jax.vmap(lambda r: lax.fori_loop(0, 3, lambda i, x: (jax.debug.print("{}", i), x * 2)[1], r))(x)
        x f32[9] => lax.scan(lambda c, t: (c + t, jax.debug.print("{}", t)), 0.0, x, reverse=True)[0]
        x f32[9] => lax.scan(lambda c, t: (c + t, jax.debug.print("{}", t)), 0.0, x, unroll=3)[0]
        x f32[4] => lax.cond(x[0] > 0, lambda x: lax.fori_loop(0, 3, lambda i, x: (jax.debug.print("{}", i), x * 2)[1], x), lambda x: x, x)
        x f32[4], n i32[] => lax.fori_loop(0, n, lambda i, x: (jax.debug.print("{}", i), x * 2)[1], x)
        x f32[9] => lax.scan(lambda c, t: (c + t, jax.debug.print("{t}", t=t, ordered=True)), 0.0, x)[0]
        """,
        """
        x f32[4] =>
            jax.debug.print("{}", x)
            return x
        x f32[4] => jax.pure_callback(np.sin, x, x)
        x f32[9] =>
            y = lax.scan(lambda c, t: (c + t, t), 0.0, x)[0]
            jax.debug.print("{}", y)
            return y
        x f32[4] => lax.cond(x[0] > 0, lambda: jax.debug.print("a"), lambda: None)
        x f32[4] => lax.fori_loop(0, 9, lambda i, x: x * 2, x)
        x f32[4] => jax.vmap(lambda t: (jax.debug.print("{}", t), t)[1])(x)
        x f32[4] =>
            for i in range(3):
                jax.debug.print("{}", i)
            return x
        x f32[1] => lax.scan(lambda c, t: (c + t, jax.debug.print("{}", t)), 0.0, x)[0]
        x f32[4] => lax.fori_loop(0, 1, lambda i, x: (jax.debug.print("{}", i), x * 2)[1], x)
        x f32[4] => lax.fori_loop(0, 0, lambda i, x: (jax.debug.print("{}", i), x * 2)[1], x)
        x f32[4] => jax.jit(lambda x: (jax.debug.print("{}", x), x)[1])(x)
        x f32[9,4] => jax.pure_callback(np.sin, x, x) + lax.map(jnp.sin, x)
        x f32[4] => jax.grad(lambda x: (jax.debug.print("{}", x), x.sum())[1])(x)
        x f32[4] =>
            from jax.experimental import io_callback
            io_callback(lambda x: None, None, x)
            return x
        x f32[9] => lax.scan(lambda c, t: (c + t, None), 0.0, jax.pure_callback(np.sin, x, x))[0]
        x f32[4] => lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x)
        x f32[4] => lax.switch(2, [lambda: None, lambda: jax.debug.print("b"), lambda: None])
        x f32[4] => jax.checkpoint(lambda x: (jax.debug.print("{}", x), x)[1])(x)
        x f32[9] => lax.associative_scan(jnp.add, x)
        x f32[0] => lax.scan(lambda c, t: (c + t, jax.debug.print("{}", t)), 0.0, x)[0]
        """,
    ),
    "JT602": (
        """
        k key(0) => random.normal(k, (4,)) + random.uniform(k, (4,))
        k key(0) => random.normal(k, (4,)) + random.normal(k, (4,))
        k key(0) =>
            a = random.split(k)[0]
            return random.normal(k, (4,)) + random.normal(a, (4,))
        k key(0) =>
            a, b = random.split(k)
            return random.normal(a, (4,)) + random.uniform(a, (4,))
        k key(0) => sum(random.normal(random.fold_in(k, 0), (4,)) for _ in range(3))
        k u32[2] => sum(random.normal(random.fold_in(k, 7), (4,)) for _ in range(2))
        k key(0), i i32[] => random.normal(random.fold_in(k, i), (4,)) + random.uniform(random.fold_in(k, i), (4,))
        k key(0), i i32[] => random.normal(random.fold_in(k, i + 1), (4,)) + random.uniform(random.fold_in(k, i + 1), (4,))
        k key(0) =>
            a = random.fold_in(random.fold_in(k, 1), 2)
            b = random.fold_in(random.fold_in(k, 1), 2)
            return random.normal(a, (4,)) + random.normal(b, (4,))
        k key(0) => random.split(random.fold_in(k, 1)), random.split(random.fold_in(k, 1))
        k key(0) => random.split(k)[0], random.split(k)[1]
        k u32[2] => random.bits(k, (4,)) + random.bits(k, (4,))
        k key(0), x f32[4] => lax.fori_loop(0, 3, lambda i, x: x + random.normal(k, (4,)), x)
        k key(0), x f32[4] => lax.fori_loop(0, 3, lambda i, x: x + random.normal(random.fold_in(k, 5), (4,)), x)
        k key(0), x f32[9] => lax.scan(lambda c, t: (c + t * random.normal(k), None), 0.0, x)[0]
        x f32[4] => random.normal(random.key(0), (4,)) + random.uniform(random.key(0), (4,)) + x
        k key(0) => jax.jit(lambda k: random.normal(k, (4,)))(k) + jax.jit(lambda k: random.normal(k, (4,)))(k)
        k key(0) => jax.jit(lambda k: random.normal(random.fold_in(k, 3), (4,)))(k) + random.normal(random.fold_in(k, 3), (4,))
        k key(0) => random.permutation(k, 8), random.normal(k, (4,))
        k key(0), x f32[8] => random.bernoulli(k, 0.5, (8,)) * x + random.bernoulli(k, 0.5, (8,))
        k key(0) =>
            ks = random.split(k, 3)
            return random.normal(ks[0], (4,)) + random.normal(ks[1], (4,)) + random.normal(ks[0], (4,))
        k key(0), i i32[] =>
            ks = random.split(k, 3)
            return random.normal(ks[i], (4,)) + random.normal(ks[i], (4,))
        k key(0), x f32[4] => lax.cond(x[0] > 0, lambda: random.normal(k, (4,)), lambda: x) + random.normal(k, (4,))
        x f32[9] => lax.scan(lambda c, t: (c + t * random.normal(random.key(1)), None), 0.0, x)[0]
        k key(0) => random.categorical(k, jnp.zeros(4)) + random.randint(k, (), 0, 4)
        a u32[], b u32[], n u32[4] => random.key_data(random.wrap_key_data(jnp.stack([a, b]))), random.bits(jnp.stack([a, b])), random.bits(jnp.stack([a, b]))
        """,
        """
        k key(0) => random.normal(k, (4,))
        k key(0) =>
            a, b = random.split(k)
            return random.normal(a, (4,)) + random.uniform(b, (4,))
        k key(0) => sum(random.normal(random.fold_in(k, i), (4,)) for i in range(3))
        k key(0), i i32[] => random.normal(random.fold_in(k, i), (4,)) + random.normal(random.fold_in(k, i + 1), (4,))
        k key(0), i i32[], j i32[] => random.normal(random.fold_in(k, i), (4,)) + random.normal(random.fold_in(k, j), (4,))
        k key(0), x f32[4] => lax.fori_loop(0, 3, lambda i, x: x + random.normal(random.fold_in(k, i), (4,)), x)
        k key(0), x f32[9] => lax.scan(lambda c, s: (c + s[0] * random.normal(s[1]), None), 0.0, (x, random.split(k, 9)))[0]
        k key(0), x f32[9] =>
            def step(carry, t):
                k, c = carry
                k, own = random.split(k)
                return (k, c + t * random.normal(own)), None
            return lax.scan(step, (k, 0.0), x)[0][1]
        k key(0), x f32[4] => lax.cond(x[0] > 0, lambda: random.normal(k, (4,)), lambda: random.uniform(k, (4,)))
        k key(0) => jax.vmap(lambda k: random.normal(k, (4,)))(random.split(k, 3))
        k key(0) =>
            ks = random.split(k, 3)
            return random.normal(ks[0], (4,)) + random.normal(ks[1], (4,)) + random.normal(ks[2], (4,))
        k key(0), i i32[] =>
            ks = random.split(k, 3)
            return random.normal(ks[i], (4,)) + random.normal(ks[(i + 1) % 3], (4,))
        k key(0) => random.normal(random.fold_in(random.fold_in(k, 1), 2), (4,)) + random.normal(random.fold_in(random.fold_in(k, 2), 1), (4,))
        k key(0), j key(1) => random.normal(k, (4,)) + random.normal(j, (4,))
        k key(0), j key(1) => random.normal(random.fold_in(k, 0), (4,)) + random.normal(random.fold_in(j, 0), (4,))
        x f32[4] => random.normal(random.key(0), (4,)) + random.uniform(random.key(1), (4,)) + x
        k key(0), x f32[4] => jax.grad(lambda x: (random.normal(k, (4,)) * x).sum())(x)
        k key(0), x f32[4] => jax.grad(jax.checkpoint(lambda x: (random.normal(k, (4,)) * jnp.sin(x)).sum()))(x)
        k key(0) =>
            noise = random.normal(k, (4,))
            return noise + noise * 2
        k key(0) => random.permutation(k, 8)
        k u32[2] =>
            a, b = random.split(k)
            return random.normal(a, (4,)) + random.uniform(b, (4,))
        k key(0), x f32[9] => jax.vmap(lambda i, t: t * random.normal(random.fold_in(k, i)))(jnp.arange(9), x)
        k key(0) => random.normal(random.fold_in(k, 0), (4,)) + random.uniform(k, (4,))
        """,
    ),
    "JT603": (
        """
        x f32[4] => jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("{}", t), lambda: None), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("positive"), lambda: None), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: lax.cond(t > 0, lambda: (jax.debug.print("{}", t), t)[1], lambda: 0 * t))(x)
        x f32[4] => jax.vmap(lambda t: (lax.cond(jnp.isnan(t), lambda: jax.debug.print("nan {}", t), lambda: None), t)[1])(x)
        x f32[4], i i32[4] => jax.vmap(lambda t, k: (lax.switch(k, [lambda: None, lambda: jax.debug.print("{}", t)]), t)[1])(x, i)
        x f32[4] => jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.callback(print, t), lambda: None), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: lax.cond(t > 0, lambda t: jax.pure_callback(np.sin, t, t, vmap_method="sequential"), lambda t: t, t))(x)
        x f32[4], y f32[4] => jax.vmap(lambda t, u: (lax.cond(t > u, lambda: jax.debug.print("{}", t), lambda: None), t)[1])(x, y)
        x f32[2,4] => jax.vmap(jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("{}", t), lambda: None), t)[1]))(x)
        x f32[4] => jax.jit(jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("{}", t), lambda: None), t)[1]))(x)
        x f32[2,4] => lax.map(jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("{}", t), lambda: None), t)[1]), x)
        x f32[4] =>
            def one(t):
                def warn():
                    jax.debug.print("{}", t)
                lax.cond(t < 0, warn, lambda: None)
                return jnp.sqrt(t)
            return jax.vmap(one)(x)
        x f32[4,3] => jax.vmap(lambda r: (lax.cond(r.sum() > 0, lambda: jax.debug.print("{}", r), lambda: None), r.sum())[1])(x)
        x f32[4] => jax.vmap(lambda t: (lax.cond(t > 0, lambda: None, lambda: jax.debug.print("{}", t)), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("a"), lambda: jax.debug.print("b")), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: lax.cond(t > 0, lambda: lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("{}", i), c)[1], t), lambda: t))(x)
        x f32[4], f bool[4] => jax.vmap(lambda t, f: (lax.cond(f, lambda: jax.debug.print("{}", t), lambda: None), t)[1])(x, f)
        x f32[3,4] => jax.vmap(lambda r: (lax.cond(r[0] > 0, lambda: jax.debug.print("{}", r[0]), lambda: None), r)[1], in_axes=1)(x)
        x f32[4] => jax.vmap(lambda t: lax.cond(t > 0, lambda t: jax.jit(lambda t: (jax.debug.print("{}", t), t)[1])(t), lambda t: t, t))(x)
        x f32[4] => jax.vmap(lambda t: lax.cond(t > 0, lambda t: (jax.debug.print("{}", t), jnp.sin(t))[1], jnp.cos, t))(x).sum()
        """,
        """
        x f32[] => lax.cond(x > 0, lambda: jax.debug.print("{}", x), lambda: None)
        x f32[4] => lax.map(lambda t: (lax.cond(t > 0, lambda: jax.debug.print("{}", t), lambda: None), t)[1], x)
        x f32[4] => jax.vmap(lambda t: (jax.debug.print("{}", t), t)[1])(x)
        x f32[4], f bool[] => jax.vmap(lambda t: (lax.cond(f, lambda: jax.debug.print("{}", f), lambda: None), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: lax.cond(t > 0, jnp.sin, jnp.cos, t))(x)
        x f32[4] =>
            lax.cond((x > 0).any(), lambda: jax.debug.print("{}", x), lambda: None)
            return jax.vmap(jnp.sin)(x)
        x f32[4] =>
            y = jax.vmap(lambda t: lax.cond(t > 0, jnp.sin, jnp.cos, t))(x)
            jax.debug.print("{}", y)
            return y
        x f32[4] => jax.pure_callback(np.sin, x, x)
        x f32[4] =>
            def one(t):
                y = lax.cond(t > 0, jnp.sin, jnp.cos, t)
                jax.debug.print("{}", y)
                return y
            return jax.vmap(one)(x)
        x f32[4] => lax.scan(lambda c, t: (c, lax.cond(t > 0, lambda: jax.debug.print("{}", t), lambda: None)), 0, x)[0]
        x f32[4] => jax.vmap(lambda t: jnp.where(t > 0, t, 0))(x)
        x f32[4] =>
            def one(t):
                jax.debug.print("{}", t)
                return lax.cond(t > 0, jnp.sin, jnp.cos, t)
            return jax.vmap(one)(x)
        x f32[4] => jax.vmap(lambda t: lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("{}", i), c)[1], t))(x)
        x f32[4] => jax.vmap(lambda t: jax.pure_callback(np.sin, t, t, vmap_method="sequential"))(x)
        x f32[4] =>
            def log(t):
                jax.debug.print("{}", t)
                return t
            return log(jax.vmap(lambda t: lax.cond(t > 0, jnp.sin, jnp.cos, t))(x))
        x f32[] => lax.switch(1, [lambda: None, lambda: jax.debug.print("b"), lambda: None])
        x f32[4] => jax.jit(lambda x: (jax.debug.print("{}", x), x)[1])(x)
        x f32[4], i i32[] => jax.vmap(lambda t: (lax.switch(i, [lambda: None, lambda: jax.debug.print("b")]), t)[1])(x)
        x f32[4] => jax.vmap(lambda t: lax.select(t > 0, t, -t))(x)
        x f32[4] => jax.vmap(jnp.sin)(jax.pure_callback(np.sin, x, x))
        """,
    ),
    "JT604": (
        """
        w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.normal(random.key(0), x.shape)) @ w).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.normal(random.PRNGKey(0), x.shape)) @ w).sum())(w)
        w f32[8], x f32[4,8] => jax.value_and_grad(lambda w: (x * random.bernoulli(random.key(1), 0.5, x.shape) @ w).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: jnp.square(x @ (w + random.uniform(random.key(3), w.shape))).sum())(w)
        w f32[8] => jax.grad(lambda w: (w * random.normal(random.split(random.key(0))[1], w.shape)).sum())(w)
        w f32[8] => jax.grad(lambda w: (w * random.normal(random.fold_in(random.key(0), 7), w.shape)).sum())(w)
        w f32[8], x f32[4,8] => jax.jit(jax.grad(lambda w: ((x + random.normal(random.key(0), x.shape)) @ w).sum()))(w)
        w f32[8], x f32[4,8] => jax.grad(jax.checkpoint(lambda w: ((x + random.normal(random.key(0), x.shape)) @ w).sum()))(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.truncated_normal(random.key(5), -1.0, 1.0, x.shape)) @ w).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.laplace(random.key(5), x.shape)) @ w).sum())(w)
        w f32[8], x f32[4,8] => jax.vjp(lambda w: ((x + random.normal(random.key(0), x.shape)) @ w).sum(), w)[1](1.0)[0]
        w f32[8] => jax.grad(lambda w: lax.fori_loop(0, 3, lambda i, v: v * random.normal(random.key(0), v.shape), w).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: lax.scan(lambda c, r: (c + (r * random.normal(random.key(0), r.shape)) @ w, None), 0.0, x)[0])(w)
        w f32[8] => jax.grad(lambda w: (w * random.rademacher(random.key(0), w.shape, jnp.float32)).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: (x[random.permutation(random.key(0), 4)] @ w).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: ((x @ w)[random.randint(random.key(2), (2,), 0, 4)]).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: jnp.where(random.uniform(random.key(0), x.shape) < 0.9, x, 0.0).sum() * w.sum())(w)
        w f32[8], x f32[4,8] => w - jax.grad(lambda w: jnp.square(x @ w + random.normal(random.key(0), (4,))).sum())(w)
        w f32[8], x f32[4,8] => jax.vmap(lambda r: jax.grad(lambda w: ((r + random.normal(random.key(0), r.shape)) @ w))(w))(x)
        w f32[8], x f32[4,8] => jax.grad(lambda w: sum((x + random.normal(random.key(i), x.shape)) @ w for i in range(2)).sum())(w)
        """,
        """
        k key(0), w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.normal(k, x.shape)) @ w).sum())(w)
        k u32[2], w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.normal(k, x.shape)) @ w).sum())(w)
        i i32[], w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.normal(random.key(i), x.shape)) @ w).sum())(w)
        i i32[], w f32[8], x f32[4,8] => jax.grad(lambda w: ((x + random.normal(random.fold_in(random.key(0), i), x.shape)) @ w).sum())(w)
        x f32[4,8] => x + random.normal(random.key(0), x.shape)
        x f32[8] => random.normal(random.key(0), (8, 8)) @ x
        k key(0), w f32[8] => jax.grad(lambda w: (w * random.normal(random.split(k)[1], w.shape)).sum())(w)
        k key(0), w f32[8] => jax.grad(lambda w: (w * random.uniform(random.split(k, 3)[2], w.shape)).sum())(w)
        k key(0), w f32[8], x f32[4,8] => jax.jit(jax.grad(lambda w: ((x + random.normal(k, x.shape)) @ w).sum()))(w)
        k key(0), w f32[8], x f32[4,8] => jax.grad(jax.checkpoint(lambda w: ((x + random.normal(k, x.shape)) @ w).sum()))(w)
        k key(0), w f32[8] => jax.grad(lambda w: lax.fori_loop(0, 3, lambda i, v: v * random.normal(random.fold_in(k, i), v.shape), w).sum())(w)
        w f32[8] => jax.grad(lambda w: lax.fori_loop(0, 3, lambda i, v: v * random.normal(random.key(i), v.shape), w).sum())(w)
        k key(0), w f32[8], x f32[4,8] => jax.grad(lambda w: lax.scan(lambda c, s: (c + (s[0] * random.normal(s[1], s[0].shape)) @ w, None), 0.0, (x, random.split(k, 4)))[0])(w)
        s u32[], w f32[8] => jax.grad(lambda w: (w * random.normal(random.key(s + 1), w.shape)).sum())(w)
        w f32[8], x f32[4,8] => jax.grad(lambda w: jnp.square(x @ w).sum())(w)
        k key(0), w f32[8], x f32[4,8] => jax.grad(lambda w: (x[random.permutation(k, 4)] @ w).sum())(w)
        k key(0), w f32[8], x f32[4,8] => jax.value_and_grad(lambda w: (x * random.bernoulli(k, 0.5, x.shape) @ w).sum())(w)
        k key(0), w f32[8], x f32[4,8] => jax.vjp(lambda w: ((x + random.normal(k, x.shape)) @ w).sum(), w)[1](1.0)[0]
        ks key<fry>[4], w f32[8], x f32[4,8] => jax.vmap(lambda k, r: jax.grad(lambda w: ((r + random.normal(k, r.shape)) @ w))(w))(ks, x)
        x f32[4,8] => jnp.square(x + random.normal(random.key(0), x.shape)).sum()
        """,
    ),
}
