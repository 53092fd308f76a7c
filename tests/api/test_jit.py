"""`jaxprtool.jit` rewrites programs, and otherwise behaves like `jax.jit`."""

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprtool import Pipeline, trace
from jaxprtool.api.jit import jit
from jaxprtool.errors import PipelineError, PluginError, UnsupportedError, user_traceback
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import user_frame
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.transforms.derivatives import Grad

X = jnp.arange(1.0, 5.0)


@jax.custom_jvp
def tripled(x):
    return jnp.maximum(x, 0)


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def model(params, x, *, scale=2.0):
    jnp.cos(x)  # dead
    h = jnp.tanh(x @ params["w"])
    total, hs = jax.lax.scan(lambda c, a: (c + jnp.sin(a), jnp.exp(a)), 0.0, h)
    branch = jax.lax.cond(total > 0, jnp.cos, jnp.sin, total)
    return (tripled(h) + doubled(hs)).sum() + scale * branch


PARAMS = {"w": jnp.linspace(-1, 1, 16).reshape(4, 4)}


def smooth(params, x):
    """A function that can be differentiated in forward mode."""
    return tripled(jnp.tanh(x @ params["w"])).sum()


def close(ours, theirs):
    mine, expected = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(mine, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


dced = functools.partial(jit, passes="dce")


# --- rewriting ------------------------------------------------------------------------------------


def test_the_compiled_program_is_the_result_of_the_passes():
    made = dced(model).trace(PARAMS, X).jaxpr
    expected = trace(model, PARAMS, X).apply("dce").jaxpr
    assert len(made.eqns) < len(trace(model, PARAMS, X).jaxpr.eqns)
    assert structural_difference(made, expected) is None


def test_equations_keep_their_source_lines_and_scopes():
    @dced
    def fun(x):
        with jax.named_scope("head"):
            return jnp.sin(x)

    (eqn,) = fun.trace(1.0).jaxpr.eqns
    assert user_frame(eqn)[2].endswith(".fun")
    text = fun.lower(1.0).as_text(debug_info=True)
    assert "jit(fun)/head/sin" in text and "test_jit.py" in text


@pytest.mark.parametrize("passes", ["dce", Pipeline.parse("dce"), Dce(), lambda p: Dce()(p)])
def test_passes_are_a_text_a_pipeline_a_pass_or_a_function(passes):
    made = jit(lambda x: (jnp.cos(x), jnp.sin(x))[1], passes=passes).trace(X).jaxpr
    assert [eqn.primitive.name for eqn in made.eqns] == ["sin"]


def test_passes_run_once_for_each_signature():
    seen = []

    def watch(program):
        seen.append(program.arg_names)
        return program

    fun = jit(lambda x, y: x + y, passes=watch)
    for args in [(1.0, 2.0), (3.0, 4.0), (X, 1.0), (X, 2.0)]:
        fun(*args)
    assert seen == [("x", "y")] * 2


@pytest.mark.proof
def test_a_pipeline_may_change_the_results():
    close(jit(lambda x: jnp.sin(x), passes="grad")(2.0), jnp.cos(2.0))
    ours = jit(model, passes="value_and_grad, dce")(PARAMS, X, scale=3.0)
    close(ours, jax.jit(jax.value_and_grad(model))(PARAMS, X, scale=3.0))


def test_named_axes_that_a_pass_binds_are_free_in_the_function():
    fun = jit(
        lambda x: jax.lax.psum(x, "i"),
        passes="batch(axis_name='i', axis_size=3, in_axes=None, out_axes=None)",
    )
    close(fun(2.0), 6.0)


# --- like jax.jit ---------------------------------------------------------------------------------


@pytest.mark.proof
def test_the_result_is_jaxs_own_object():
    fun = dced(model)
    assert type(fun) is type(jax.jit(model))
    assert fun.__name__ == "model" and fun.__wrapped__ is model
    close(fun(PARAMS, X), model(PARAMS, X))
    assert fun._cache_size() == 1
    assert fun.eval_shape(PARAMS, X).shape == ()
    close(fun.lower(PARAMS, X).compile()(PARAMS, X), model(PARAMS, X))


def test_jit_is_a_decorator_with_and_without_options():
    @jit(passes="dce", static_argnames="n")
    def power(x, n):
        return x**n

    @functools.partial(jit, passes="dce", static_argnums=1)
    def other(x, n):
        return x**n

    assert power(2.0, n=3) == other(2.0, 3) == power(2.0, 3) == other(2.0, n=3) == 8.0


def test_static_arguments_reach_the_function_unchanged():
    class Config:
        layers = 2

    config = Config()

    def fun(x, c, *rest, mode, tree):
        assert c is config and mode == "a" and tree == (1, (2, None))
        return sum(rest, x) * c.layers

    ours = dced(fun, static_argnums=1, static_argnames=("mode", "tree"))
    assert ours(1.0, config, 2.0, 3.0, mode="a", tree=(1, (2, None))) == 12.0


@pytest.mark.parametrize("number", [-1, 1])
def test_negative_static_positions_count_from_the_end(number):
    assert dced(lambda x, n: x * (n if type(n) is int else 0), static_argnums=number)(2.0, 4) == 8


def test_methods_with_a_static_self():
    class Scale:
        factor = 3.0

        @functools.partial(jit, static_argnums=0, passes="dce")
        def __call__(self, x):
            return self.factor * x

    assert Scale()(2.0) == 6.0


def test_arguments_are_donated():
    x = jnp.ones(8)
    dced(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()


def test_shardings_are_passed_on():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))
    out = dced(lambda x: x * 2, in_shardings=sharding, out_shardings=sharding)(X)
    assert out.sharding == sharding


def test_none_keywords_and_empty_trees():
    def fun(x, nothing, *, extra=None):
        return {"x": x, "none": nothing, "empty": (), "extra": extra}

    close(dced(fun)(1.0, None, extra={"a": X}), fun(1.0, None, extra={"a": X}))


@pytest.mark.proof
def test_keys_are_arguments():
    key = jax.random.key(3)
    close(dced(lambda k: jax.random.normal(k, (3,)))(key), jax.random.normal(key, (3,)))


def test_refs_can_be_arguments_and_closed_over():
    outer, inner = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(2))

    @dced
    def update(ref, x):
        outer[...] += x
        ref[0] = x
        return outer[...] * 2

    close((update(inner, 1.0), update(inner, 2.0)), (jnp.full(3, 2.0), jnp.full(3, 6.0)))
    close((outer[...], inner[...]), (jnp.full(3, 3.0), jnp.array([2.0, 0.0])))


def sums_of_views(trees, i):
    view = trees["a"][0]
    view[0] = trees["b"]
    return view[...].sum() + view.at[i][...], view.at[1:].at[i][...]


@pytest.mark.parametrize(
    "cut", [lambda ref, i: ref.at[1], lambda ref, i: ref.at[i], lambda ref, i: ref.at[1:, i]]
)
def test_views_of_refs_are_arguments(cut):
    def run(j):
        def fun(ref, i):
            return j(sums_of_views)({"a": [cut(ref, i)], "b": 7.0}, i), ref[...]

        return jax.jit(fun)(jax.new_ref(jnp.arange(12.0).reshape(4, 3)), 1)

    close(run(dced), run(jax.jit))


def test_effects_happen_in_order():
    seen = []

    @dced
    def fun(x):
        jax.debug.callback(seen.append, x, ordered=True)
        jax.debug.callback(seen.append, x + 1, ordered=True)
        return x

    fun(1.0)
    jax.effects_barrier()
    assert seen == [1.0, 2.0]


def test_disable_jit_runs_the_function_itself():
    with jax.disable_jit():
        assert dced(lambda x: x if x > 0 else -x)(-2.0) == 2.0


# --- inside other transformations -----------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f),
        lambda f: jax.jit(jax.value_and_grad(f)),
        lambda f: jax.checkpoint(f),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: dced(f),
    ],
)
def test_jit_nests_in_transformations(transform):
    close(transform(dced(model))(PARAMS, X), jax.jit(transform(model))(PARAMS, X))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jacfwd(f, argnums=1),
        lambda f: lambda *args: jax.jvp(f, args, args),
        lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
    ],
)
def test_jit_nests_in_forward_mode(transform):
    close(transform(dced(smooth))(PARAMS, X), jax.jit(transform(smooth))(PARAMS, X))


@pytest.mark.parametrize("inside", [lambda f: f, jax.grad, jax.jit])
def test_jit_nests_in_vmap(inside):
    xs = jnp.stack([X, 2 * X])
    close(
        jax.vmap(inside(dced(model)), in_axes=(None, 0))(PARAMS, xs),
        jax.jit(jax.vmap(inside(model), in_axes=(None, 0)))(PARAMS, xs),
    )


def test_jit_nests_in_loops():
    def step(fun):
        return jax.lax.scan(lambda c, x: (fun(c, x), c), 1.0, X)

    def body(c, x):
        return jnp.sin(c) * x

    close(step(dced(body)), step(body))


@pytest.mark.proof
def test_closed_over_tracers_are_operands():
    programs = []

    def watch(program):
        programs.append(program)
        return Dce()(program)

    def outer(x):
        return jit(lambda y: (jnp.sin(x * y) * X).sum(), passes=watch)(2.0)

    close(jax.grad(outer)(1.5), jax.grad(lambda x: (jnp.sin(x * 2.0) * X).sum())(1.5))
    close(jax.vmap(outer)(X), jax.vmap(lambda x: (jnp.sin(x * 2.0) * X).sum())(X))
    assert programs[0].arg_names == ("y", "closed_over[0]")
    assert [const.shape for const in programs[0].jaxpr.consts] == [(4,)]
    assert not any(isinstance(c, jax.core.Tracer) for p in programs for c in p.jaxpr.consts)


def test_positions_do_not_count_closed_over_values():
    def outer(x):
        return jit(lambda a, b: a * b * x, passes="grad(argnums=-1)")(2.0, 3.0)

    close(jax.jit(outer)(5.0), 10.0)


def test_collectives_over_enclosing_axes():
    def fun(x):
        return x / jax.lax.psum(x, "i")

    close(jax.vmap(dced(fun), axis_name="i")(X), X / 10)
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    close(mapped(dced(fun))(X), jnp.ones(4))
    close(dced(mapped(fun))(X), jnp.ones(4))


def test_threads_can_share_a_function():
    fun, results = dced(model), []
    threads = [threading.Thread(target=lambda: results.append(fun(PARAMS, X))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(results, [model(PARAMS, X)] * 6)


@pytest.mark.proof
def test_no_tracer_leaks():
    with jax.checking_leaks():
        close(dced(model)(PARAMS, X), model(PARAMS, X))
        close(jax.grad(dced(model))(PARAMS, X), jax.grad(model)(PARAMS, X))


# --- errors ---------------------------------------------------------------------------------------


def test_errors_of_the_function_are_raised_unchanged():
    def fun(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        dced(fun)(1.0)
    assert user_traceback(raised.value)[-1].name == "fun"


@pytest.mark.parametrize(
    "fun", [lambda x: bool(x > 0), lambda x: {"out": "text"}, lambda x: jnp.ones(int(x))]
)
def test_errors_of_jax_are_raised_unchanged(fun):
    with pytest.raises(TypeError) as theirs:
        jax.jit(fun)(1.0)
    with pytest.raises(type(theirs.value)) as ours:
        dced(fun)(1.0)
    assert str(ours.value) == str(theirs.value)


def test_static_arguments_must_be_hashable_as_in_jax():
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        dced(lambda x, n: x, static_argnums=1)(1.0, [1])
    with pytest.raises(TypeError):
        dced(3)


@pytest.mark.parametrize(("passes", "says"), [("dcee", "unknown pass"), (3, "not 3")])
def test_invalid_passes_are_reported_at_once(passes, says):
    with pytest.raises(PipelineError, match=says):
        jit(model, passes=passes)


@pytest.mark.parametrize(
    ("passes", "says"),
    [
        ("vjp", "return several programs for model: forward, backward"),
        ("closed(args={'scale': 1.0})", "change the arguments of model"),
        ("batch(axis_size=2)", "change the arguments of model"),
        (lambda program: None, "returned NoneType, not a Program"),
    ],
)
def test_passes_that_do_not_return_one_program_of_the_arguments_are_refused(passes, says):
    with pytest.raises(PipelineError, match=says):
        jit(model, passes=passes)(PARAMS, X, scale=2.0)


def test_an_error_of_a_pass_names_the_pass():
    with pytest.raises(UnsupportedError, match="grad") as raised:
        jit(lambda x: x, passes="dce, grad")(X)
    assert "Raised by pass 'grad'" in raised.value.__notes__[0]

    class Broken(Grad):
        name = "broken"

        def __call__(self, program: Program) -> Program:
            raise KeyError("oops")

    with pytest.raises(PluginError, match="pass 'broken' failed"):
        jit(lambda x: x, passes=Broken())(1.0)


# --- the default pipeline -------------------------------------------------------------------------


@pytest.mark.proof
def test_the_default_pipeline_reduces_the_program_and_computes_the_same():
    gradient = jax.value_and_grad(model)
    fun = jit(gradient)
    assert len(fun.trace(PARAMS, X).jaxpr.eqns) < len(jax.jit(gradient).trace(PARAMS, X).jaxpr.eqns)
    close(fun(PARAMS, X), gradient(PARAMS, X))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.vmap(f, (None, 0))])
def test_the_default_pipeline_nests_in_transformations(transform):
    xs = X if transform is jax.grad else jnp.stack([X, -X])
    close(transform(jit(model))(PARAMS, xs), transform(model)(PARAMS, xs))


def test_the_default_pipeline_does_not_fold_enclosing_tracers():
    def outer(x):
        return jit(lambda y: (y * x + 0.0) * (2.0 * 3.0))(1.0)

    close(jax.grad(outer)(2.0), 6.0)
    close(jax.vmap(outer)(X), 6 * X)


# --- one trace for all wrappers -------------------------------------------------------------------


def test_wrappers_of_a_function_share_traces_and_compilations():
    traced, ran = [], []

    def fun(x):
        traced.append(x.shape)
        return jnp.sin(x)

    def passes(program):
        ran.append(program.name)
        return program

    for _ in range(2):
        close(jit(fun)(X), jnp.sin(X))
        jit(fun, passes="-O1", donate_argnums=())(X)
        assert traced == [(4,)]
    for _ in range(2):
        jit(fun, passes=Pipeline.parse("-O1"))(X)
    assert traced == [(4,)]
    jit(fun)(X[:2])
    jit(fun, passes="dce")(X)
    assert traced == [(4,), (2,), (4,)]
    by_function = jit(fun, passes=passes)
    for _ in range(2):
        by_function(X)
    assert ran == ["fun"] and len(traced) == 4


def test_static_arguments_and_the_function_distinguish_wrappers():
    def fun(x, n=1):
        return x * n if isinstance(n, int) else x + n

    close(jit(fun, static_argnames="n")(X, n=2), X * 2)
    close(jit(fun)(X, n=2), X + 2)

    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

        def __call__(self, x):
            return x * self.scale

    two, three = Scaled(2), Scaled(3)
    close(jit(two)(X), X * 2)
    close(jit(three)(X), X * 3)


def test_only_a_wrapper_keeps_its_function_alive():
    def made():
        def fun(x):
            return x * 2

        return weakref.ref(fun), jit(fun), jit(jit(jax.jit(fun)), passes="dce")

    weak, *wrappers = made()
    gc.collect()
    for wrapper in wrappers:
        close(wrapper(X), X * 2)
    del wrapper, wrappers
    gc.collect()
    assert weak() is None


@pytest.mark.parametrize("late", [False, True])
def test_a_wrapper_may_have_the_name_of_another_function(late):
    wrapped = jit(lambda x: x + 1)
    if late:
        wrapped(1.0)
    functools.update_wrapper(wrapped, power)
    functools.update_wrapper(wrapped, jit(lambda x: x + 2))
    gc.collect()
    close(wrapped(X), X + 1)


def test_passes_that_close_over_the_function_do_not_keep_it_alive():
    def fun(x):
        return x * 2

    weak = weakref.ref(fun)
    close(jit(fun, passes=functools.partial(lambda fun, program: program, fun))(X), X * 2)
    del fun
    gc.collect()
    assert weak() is None


# --- the contract, compared with jax.jit ----------------------------------------------------------


class Slots:
    __slots__ = ()

    def __call__(self, x):
        return x


def generator(x):
    yield x


def power(x, n=1):
    return x**n


def freed(end, use):
    def fun(x):
        ref = jax.new_ref(x)
        value = end(ref)
        return use(ref), value, x

    return fun


REFUSED = {
    "None": lambda j: j(None),
    "a number": lambda j: j(3),
    "a generator": lambda j: j(generator),
    "a static method": lambda j: j(staticmethod(power)),
    "a class method": lambda j: j(classmethod(power)),
    "an unknown option": lambda j: j(power, speed=1),
    "donation out of range": lambda j: j(power, donate_argnums=5),
    "donation of nothing": lambda j: j(power, donate_argnames="q"),
    "donation of what is static": lambda j: j(power, static_argnums=0, donate_argnums=0),
    "static out of range": lambda j: j(power, static_argnums=5),
    "static of a word": lambda j: j(power, static_argnums="n"),
    "static of nothing": lambda j: j(power, static_argnames="q"),
    "static unhashable": lambda j: j(power, static_argnums=1)(X, [1]),
    "static unhashable by name": lambda j: j(power, static_argnames="n")(X, n=[1]),
    "static traced": lambda j: j(lambda n: j(power, static_argnums=1)(X, n))(2),
    "shardings of another tree": lambda j: j(power, in_shardings=(None,) * 3)(X),
    "no sharding": lambda j: j(power, in_shardings=3)(X),
    "an argument of another type": lambda j: j(power)("x"),
    "a result of another type": lambda j: j(lambda x: "x")(X),
    "too many arguments": lambda j: j(lambda x: x)(1, 2),
    "a value asked for": lambda j: j(lambda x: int(x))(1.0),
    "a ref among results": lambda j: j(jax.new_ref)(X),
    "one ref twice": lambda j: j(lambda a, b: a[...] + b[...])(*[jax.new_ref(X)] * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_jax_jit_refuses_are_refused_with_the_same_error(name):
    errors = []
    for j in (jax.jit, jit):
        with pytest.raises(Exception) as caught:
            REFUSED[name](j)
        errors.append(caught.value)
    theirs, ours = errors
    assert type(ours) is type(theirs)
    assert str(ours)[:40] == str(theirs)[:40]


def test_a_function_without_weak_references_or_hash_is_a_type_error():
    class NoHash(Slots):
        __hash__ = None

    for fun in Slots(), NoHash():
        with pytest.raises(TypeError, match=r"weak reference|unhashable"):
            jit(fun)


@pytest.mark.parametrize("end", [jax.freeze, jax.free_ref])
@pytest.mark.parametrize(
    "use",
    [
        lambda ref: ref[...],
        jax.freeze,
        lambda ref: jax.jit(lambda: ref[...])(),
        lambda ref: jax.lax.scan(lambda c, _: (c + ref[0], None), 0.0, length=2)[0],
    ],
)
def test_a_freed_ref_cannot_be_read(end, use):
    for j, errors in ((jax.jit, (ValueError, KeyError)), (jit, ValueError)):
        with pytest.raises(errors, match="has been freed" if j is jit else None):
            j(freed(end, use))(X)


@pytest.mark.parametrize("end", [jax.freeze, jax.free_ref])
@pytest.mark.parametrize("write", [jax.ref.addupdate, jax.ref.set])
def test_a_freed_ref_cannot_be_written(end, write):
    def fun(x):
        ref = jax.new_ref(x)
        value = end(ref)
        write(ref, ..., x)
        return value, ref[...]

    for j, errors in ((jax.jit, (ValueError, KeyError)), (jit, ValueError)):
        with pytest.raises(errors, match="the (swap|addupdate) .* freed" if j is jit else None):
            j(fun)(X)


def test_uses_of_freed_refs_that_jax_allows_are_allowed():
    def unread(ref):
        ref[...]

    close(jit(freed(jax.free_ref, unread))(X)[-1], X)
