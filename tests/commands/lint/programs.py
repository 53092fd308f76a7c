"""Functions that lint rules must find, and others. Comments with a code mark the findings."""

#: Each text is the body of a module with a function `f` and its example arguments. The lines of all
#: findings, and no others, end in a comment with their code.
PROGRAMS = {
    # --- keys -------------------------------------------------------------------------------------
    "branches of a cond may use the same key": """
        @jaxprtool.example("key(0)", "f32[64]")
        def f(key, x):
            normal = lambda x: x + jax.random.normal(key, x.shape)
            uniform = lambda x: x + jax.random.uniform(key, x.shape)
            return jax.lax.cond(x[0] > 0, normal, uniform, x)
    """,
    "a branch and what follows it may not": """
        @jaxprtool.example("key(0)", "f32[64]")
        def f(key, x):
            normal = lambda x: x + jax.random.normal(key, x.shape)
            x = jax.lax.cond(x[0] > 0, normal, lambda x: x, x)
            return x + jax.random.uniform(key, x.shape)  # JT602
    """,
    "a checkpoint draws again from the same key": """
        @jaxprtool.example("f32[64]", "key(0)")
        def f(x, key):
            @jax.checkpoint
            def layer(x):
                return jnp.sin(x) * jax.random.bernoulli(key, 0.5, x.shape)
            return jax.grad(lambda x: layer(x).sum())(x)
    """,
    "the rule of a function's derivative draws its numbers again": """
        @jax.custom_jvp
        def perturbed(x, key):
            return jnp.sign(x + jax.random.normal(key, (8, *x.shape))).mean(0)

        @perturbed.defjvp
        def rule(primals, tangents):
            (x, key), (dx, _) = primals, tangents
            noise = jax.random.normal(key, (8, *x.shape))
            return perturbed(x, key), (jnp.sign(x + noise) * noise * dx).mean(0)

        @jaxprtool.example("f32[64]", "key(0)")
        def f(x, key):
            return jax.value_and_grad(lambda x: perturbed(x, key).sum())(x)
    """,
    "keys that are split, folded, and scanned over": """
        @jaxprtool.example("key(0)", "f32[10,64]")
        def f(key, xs):
            first, second, third = jax.random.split(key, 3)
            def step(h, given):
                x, key = given
                return jnp.tanh(h + x + jax.random.normal(key, x.shape)), None
            h, _ = jax.lax.scan(step, jnp.zeros(64), (xs, jax.random.split(first, 10)))
            def again(i, h):
                return h + jax.random.normal(jax.random.fold_in(second, i), h.shape)
            return jax.lax.fori_loop(0, 5, again, h) + jax.random.normal(third, h.shape)
    """,
    "a key from outside of a loop": """
        @jaxprtool.example("key(0)", "f32[10,64]")
        def f(key, xs):
            def step(h, x):
                return jnp.tanh(h + x + jax.random.normal(key, x.shape)), None  # JT602
            return jax.lax.scan(step, jnp.zeros(64), xs)[0]
    """,
    "the words of a key are a key": """
        @jaxprtool.example("u32[2]", "f32[64]")
        def f(key, x):
            first, second = jax.random.split(key)
            x = x + jax.random.normal(first, x.shape)
            x = x * jax.random.uniform(second, x.shape)
            return x + jax.random.normal(first, x.shape)  # JT602
    """,
    "a key that is split and drawn from": """
        @jaxprtool.example("key(0)", "f32[64]")
        def f(key, x):
            x = x + jax.random.normal(key, x.shape)
            key, other = jax.random.split(key)  # JT602
            return x + jax.random.normal(other, x.shape)
    """,
    # --- numerics ---------------------------------------------------------------------------------
    "softmax in steps, with a running maximum": """
        @jaxprtool.example("f32[4,8,64]")
        def f(scores):
            def step(carry, block):
                top, total = carry
                new = jnp.maximum(top, block.max(-1))
                weights = jnp.exp(block - new[:, None])
                return (new, total * jnp.exp(top - new) + weights.sum(-1)), None
            start = jnp.full(8, -jnp.inf), jnp.zeros(8)
            (top, total), _ = jax.lax.scan(step, start, scores)
            return top + jnp.log(total)
    """,
    "kernels that cannot overflow": """
        @jaxprtool.example("f32[32,3]")
        def f(x):
            square = jnp.square(x[:, None] - x[None]).sum(-1)
            weights = jnp.exp(-0.5 * square)
            return weights / weights.sum(-1, keepdims=True)
    """,
    "a logsumexp by hand": """
        @jaxprtool.example("f32[8,64]")
        def f(scores):
            return jnp.log(jnp.exp(scores).sum(-1))  # JT701
    """,
    "a softmax by hand with its maximum": """
        @jaxprtool.example("f32[8,64]")
        def f(scores):
            weights = jnp.exp(scores - scores.max(-1, keepdims=True))
            return weights / weights.sum(-1, keepdims=True)
    """,
    "cross entropy of sigmoids by hand": """
        @jaxprtool.example("f32[64]", "f32[64]")
        def f(scores, labels):
            p = jax.nn.sigmoid(scores)
            ones = labels * jnp.log(p)  # JT703
            zeros = (1 - labels) * jnp.log(1 - p)  # JT703
            return -(ones + zeros).mean()
    """,
    "a quotient that where guards": """
        @jaxprtool.example("f32[64]", "f32[64]")
        def f(x, n):
            return jnp.where(n > 0, x / n, 0.0).sum()  # JT702
    """,
    "a quotient of labels, by which JAX does not differentiate": """
        @jaxprtool.example("f32[64]", "f32[64]")
        def f(scores, labels):
            total = labels.sum()
            wanted = jnp.where(total > 0, labels / total, 0.0)
            return (scores * wanted).sum()
    """,
    "a quotient of labels beside a gradient": """
        @jaxprtool.example("f32[64]", "f32[64]")
        def f(scores, labels):
            total = labels.sum()
            wanted = jnp.where(total > 0, labels / total, 0.0)
            return jax.grad(lambda scores: jnp.square(scores * wanted).sum())(scores)
    """,
    "a quotient in a gradient": """
        @jaxprtool.example("f32[64]", "f32[64]")
        def f(x, n):
            def loss(x):
                return jnp.where(n > 0, x / n, 0.0).sum()  # JT702
            return jax.grad(loss)(x)
    """,
    "a mean of those that a mask chooses, if any": """
        @jaxprtool.example("f32[64]", "bool[64]")
        def f(x, mask):
            mean = jnp.square(x).mean(where=mask)
            count = mask.sum()
            own = jnp.where(mask, x, 0.0).sum() / count
            return jnp.where(jnp.isnan(mean), 0.0, mean) + jnp.where(count > 0, own, 0.0)
    """,
    "a mean of those that a product with a mask chooses, if any": """
        @jaxprtool.example("f32[64]", "bool[64]")
        def f(x, mask):
            count = mask.sum()
            mean = (x * mask).sum() / count  # JT702
            return jnp.where(count > 0, mean, 0.0)
    """,
    "choices of zero guard nothing": """
        @jaxprtool.example("f32[64]", "bool[64]")
        def f(x, mask):
            kept = jnp.where(mask, x, 0)
            root = jnp.where(kept > 0, jnp.sqrt(kept), 0.0)  # JT702
            positive = jnp.maximum(x, 0.0)
            return (root + jnp.where(x > 0, jnp.log(positive), 0.0)).sum()  # JT702
    """,
    "choices of other numbers do, and those that stop the gradient": """
        @jaxprtool.example("f32[64]", "bool[64]", "f32[64]")
        def f(x, mask, other):
            root = jnp.where(x > 0, jnp.sqrt(jnp.where(mask, x, other)), 0.0)
            root = root + jnp.where(x > 0, jnp.sqrt(jax.nn.relu(x)), 0.0)
            root = root + jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 0.0)), 0.0)
            return (root + jnp.where(x > 0, jnp.log(jnp.maximum(x, 1e-6)), 0.0)).sum()
    """,
    "a quotient without a gradient": """
        @jaxprtool.example("f32[64]", "f32[64]")
        def f(x, n):
            return jnp.where(n > 0, x / n, 0.0)
    """,
    "a root of a guarded sum, and the statistics of jnp": """
        @jaxprtool.example("f32[8,64]")
        def f(x):
            x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
            square = jnp.square(x).sum(-1)
            norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))
            return jnp.where(square > 0, norm, 0.0).sum() + jnp.nanmean(x)
    """,
    "a where that has nothing to do with the root": """
        @jaxprtool.example("f32[64]", "bool[64]")
        def f(x, mask):
            return jnp.where(mask, jnp.sqrt(jnp.square(x) + 1e-6), 0.0).sum()
    """,
    # --- dtypes -----------------------------------------------------------------------------------
    "mixed precision as it is meant": """
        @jaxprtool.example({"w": "f32[64,64]", "scale": "f32[64]"}, "bf16[128,64]")
        def f(params, x):
            wide = x.astype(jnp.float32)
            wide = wide / jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
            x = (wide * params["scale"]).astype(x.dtype)
            x = x @ params["w"].astype(x.dtype)
            return jax.nn.softmax(x.astype(jnp.float32)).sum() + x.astype(jnp.float32).mean()
    """,
    "a master copy is updated": """
        @jaxprtool.example("f32[64,64]", "bf16[64,64]")
        def f(weight, gradient):
            return weight - 0.1 * gradient
    """,
    "a product of bf16 and f32": """
        @jaxprtool.example("f32[64,64]", "bf16[128,64]")
        def f(w, x):
            return jnp.tanh(x @ w)  # JT202
    """,
    "a product with a wider sum": """
        @jaxprtool.example("bf16[64,64]", "bf16[128,64]")
        def f(w, x):
            return jnp.tanh(jnp.matmul(x, w, preferred_element_type=jnp.float32))
    """,
    "a scalar of NumPy": """
        @jaxprtool.example("bf16[128,64]")
        def f(x):
            return jnp.tanh(x * np.float32(0.125)) * 2.0  # JT202
    """,
    "integers and f64 that are asked for": """
        jax.config.update("jax_enable_x64", True)

        @jaxprtool.example("f32[128]", "i32[128]")
        def f(x, n):
            wide = x.astype(jnp.float64).cumsum()
            return (wide / 2).astype(jnp.float32) + n
    """,
    "ones of the default type": """
        jax.config.update("jax_enable_x64", True)

        @jaxprtool.example("f32[128]")
        def f(x):
            return x + jnp.linspace(0.0, 1.0, 128)  # JT201
    """,
    # --- indexing ---------------------------------------------------------------------------------
    "every second row, and rows that are not known": """
        @jaxprtool.example("f32[512,64]", "i32[100]")
        def f(x, rows):
            return x[jnp.arange(0, 512, 2)].sum(0) + x[rows].sum(0)  # JT401
    """,
    "picked scores, and their gradient": """
        @jaxprtool.example("f32[512,64]", "i32[512]")
        def f(scores, labels):
            def loss(scores):
                picked = scores[jnp.arange(512), labels]  # JT402
                return -jax.nn.log_softmax(scores).mean() + picked.mean()
            return jax.grad(loss)(scores)
    """,
    "rows that may be equal": """
        @jaxprtool.example("f32[512,64]", "i32[512]")
        def f(x, rows):
            return x.at[rows].add(1.0)
    """,
    "the five best, by argsort": """
        @jaxprtool.example("f32[8,4096]")
        def f(x):
            return jnp.argsort(x, descending=True)[:, :5]  # JT403
    """,
    "a median, and ranks": """
        @jaxprtool.example("f32[8,4096]")
        def f(x):
            return jnp.median(x, -1), jnp.argsort(jnp.argsort(x)), jnp.sort(x)[:, ::64]
    """,
    # --- loops ------------------------------------------------------------------------------------
    "a stack that is returned too": """
        @jaxprtool.example("f32[64]", "f32[100,64]")
        def f(start, xs):
            def step(h, x):
                h = jnp.tanh(h + x)
                return h, h
            _, hs = jax.lax.scan(step, start, xs)
            return hs[-1], hs
    """,
    "a few layers": """
        @jaxprtool.example("f32[4,64,64]", "f32[8,64]")
        def f(layers, x):
            for w in layers:
                x = jax.nn.softmax(jax.nn.gelu(x @ w)) + x
            return x
    """,
    "what a comprehension goes over is computed once": """
        @jaxprtool.example("f32[64,64]")
        def f(x):
            return sum(y.sum() for y in [jnp.select([x > i for i in range(64)], [x] * 64)])
    """,
    "many layers, and their gradient": """
        @jaxprtool.example(["f32[64,64]"] * 24, "f32[8,64]")
        def f(layers, x):
            def loss(layers):
                y = x
                for w in layers:  # JT501
                    y = layer(y, w)
                return y.mean()
            return jax.grad(loss)(layers)

        def layer(x, w):
            hidden = jax.nn.gelu(x @ w)
            return x + jax.nn.softmax(hidden)
    """,
    "a cond whose predicate all elements share": """
        @jaxprtool.example("f32[16,64]", "f32[64,64]", "bool[]")
        def f(xs, w, flag):
            def one(x):
                return jax.lax.cond(flag, lambda x: jnp.tanh(x @ w), lambda x: x, x)
            return jax.vmap(one)(xs)
    """,
    "a function of Python outside of loops": """
        @jaxprtool.example("f32[64]")
        def f(x):
            jax.debug.print("{}", x.sum())
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((64,), np.float32), x)
    """,
    # --- unused, constants, gradients -------------------------------------------------------------
    "a state with fields for others": """
        @jaxprtool.example({"mean": "f32[64,64]", "rest": "f32[64,64]"}, "f32[64]")
        def f(state, x):
            return state["mean"] @ x
    """,
    "an array of a closure": """
        def made():
            table = np.ones((512, 1024), np.float32)

            @jaxprtool.example("f32[8,512]")
            def f(x):
                return x @ table  # JT101
            return f

        f = made()
    """,
    "an accuracy has no gradient": """
        @jaxprtool.example({"w": "f32[64,10]"}, "f32[8,64]", "i32[8]")
        def f(params, x, labels):
            return (jnp.argmax(x @ params["w"], -1) == labels).mean()
    """,
    "a training step on an accuracy": """
        def loss(params, x, labels):
            logits = x @ params["w"]
            return (jnp.argmax(logits, -1) == labels).mean()  # JT803

        @jaxprtool.example({"w": "f32[64,10]"}, "f32[8,64]", "i32[8]")
        def f(params, x, labels):
            value, slopes = jax.value_and_grad(loss)(params, x, labels)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, slopes), value
    """,
    "a loop of training steps on rounded values": """
        def loss(params, x):
            return jnp.square(jnp.round(x @ params["w"])).mean()  # JT803

        @jaxprtool.example({"w": "f32[64,10]"}, "f32[5,8,64]")
        def f(params, xs):
            def step(params, x):
                value, slopes = jax.value_and_grad(loss)(params, x)
                return jax.tree.map(lambda w, g: w - 0.1 * g, params, slopes), value
            return jax.lax.scan(step, params, xs)
    """,
    "a training step that also returns an accuracy": """
        def loss(params, x, labels):
            logits = x @ params["w"]
            return jnp.square(logits).mean(), (jnp.argmax(logits, -1) == labels).mean()

        @jaxprtool.example({"w": "f32[64,10]"}, "f32[8,64]", "i32[8]")
        def f(params, x, labels):
            grad = jax.value_and_grad(loss, has_aux=True)
            (value, accuracy), slopes = grad(params, x, labels)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, slopes), value, accuracy
    """,
    "a tangent in forward mode beside zeros": """
        @jaxprtool.example({"w": "f32[64]"}, "f32[64]")
        def f(params, x):
            velocity = jnp.zeros(64)
            loss = lambda w: jnp.square(w * x - jnp.round(x)).mean()
            return jax.jvp(loss, (params["w"],), (x,)), params["w"] + velocity
    """,
    "a gradient that is stopped on purpose": """
        @jaxprtool.example({"w": "f32[64]", "target": "f32[64]"}, "f32[8,64]")
        def f(params, x):
            target = jax.lax.stop_gradient(x * params["target"])
            return jnp.square(x * params["w"] - target).mean()
    """,
    "a threshold that nothing trains": """
        @jaxprtool.example({"w": "f32[64]", "threshold": "f32[64]"}, "f32[8,64]")
        def f(params, x):
            kept = x > params["threshold"]  # JT801
            return jnp.square(x * params["w"] * kept).mean()
    """,
    "a checkpoint that saves everything": """
        @jaxprtool.example("f32[64,64]", "f32[8,64]")
        def f(w, x):
            policy = jax.checkpoint_policies.everything_saveable
            layer = jax.checkpoint(lambda x: jnp.tanh(x @ w), policy=policy)
            return jnp.sin(layer(x)).mean()  # JT802
    """,
    "a checkpoint in each iteration": """
        @jaxprtool.example("f32[4,64,64]", "f32[8,64]")
        def f(layers, x):
            @jax.checkpoint
            def layer(x, w):
                return jnp.tanh(x @ w), None
            return jax.lax.scan(layer, x, layers)[0].mean()
    """,
}

#: The imports of all of them.
HEAD = """\
import jax
import jax.numpy as jnp
import numpy as np
import jaxprtool
"""
