"""The registrations of an extension for its primitive, by the public API, affect all passes."""

import importlib
import pkgutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching

import jaxprtool
from jaxprtool import extend
from jaxprtool.errors import PluginError
from jaxprtool.extend.rules import call
from jaxprtool.ir import rules
from tests.share import on_one_release

X = jnp.arange(6.0).reshape(2, 3)

blend_p = Primitive("test_blend")
blend_p.def_impl(lambda x, y: (x + y) / 2)
blend_p.def_abstract_eval(lambda x, y: x)


@extend.rule("batch", "test_blend")
def _batch(axis, primitive, operands, dims, params):
    """Batch a primitive whose operands have the batch dimension at the same axis."""
    x, y = (
        a if dim == 0 else jnp.broadcast_to(a, (axis.size, *a.shape))
        for a, dim in zip(operands, dims, strict=True)
    )
    return primitive.bind(x, y, **params), 0


@extend.rule("python", "test_blend")
def _python(eqn, x, y):
    yield call("jnp.test_blend", x, y)


@pytest.fixture(autouse=True)
def traits():
    """Give each test the default traits of a primitive."""
    extend.add_traits("test_blend", **vars(extend.Traits()))


def count(program, name="test_blend"):
    return sum(eqn.primitive.name == name for eqn in extend.equations(extend.top_jaxpr(program)))


def both_orders(x, y):
    return blend_p.bind(x, y), blend_p.bind(y, x)


def test_commutative_operations_are_merged_in_either_order():
    program = jaxprtool.trace(both_orders, X, X)
    assert count(program.apply("cse")) == 2
    extend.add_traits("test_blend", commutative="f", commutative_bits="f")
    assert count(program.apply("cse")) == 1
    extend.add_traits("test_blend", may_merge=False)
    assert count(program.apply("cse")) == 2


def test_expensive_operations_are_hoisted():
    def loop(x):
        return jax.lax.fori_loop(0, 9, lambda i, c: c + blend_p.bind(large(x), large(x)), large(x))

    def large(x):
        return jnp.broadcast_to(x[0, 0], (400, 400))

    program = jaxprtool.trace(loop, X)

    def outside(program):
        return sum(eqn.primitive is blend_p for eqn in program.jaxpr.eqns)

    assert outside(program.apply("hoist")) == 0
    extend.add_traits("test_blend", expensive=True)
    assert outside(program.apply("hoist")) == 1
    extend.add_traits("test_blend", may_hoist=False)
    assert outside(program.apply("hoist")) == 0


@pytest.mark.proof
def test_a_batching_rule_is_used_and_python_is_written(monkeypatch):
    mapped = jaxprtool.vmap(lambda x: blend_p.bind(x, X[0]))
    np.testing.assert_allclose(mapped(X), (X + X[0]) / 2)
    monkeypatch.setattr(jnp, "test_blend", blend_p.bind, raising=False)
    source = jaxprtool.to_python(jaxprtool.trace(blend_p.bind, X, X))
    assert "jnp.test_blend(" in source


def test_traits_and_rules_of_an_installed_plugin_are_found_on_demand(monkeypatch):
    class Point:
        def load(self):
            extend.add_traits("test_lazy", expensive=True)
            extend.rule("dce", "test_lazy")("the rule")

    monkeypatch.setattr(rules, "_installed", lambda: {"test_lazy": Point()})
    assert extend.traits("test_lazy").expensive
    from jaxprtool.passes.cleanup.dce import dce_rules

    assert dce_rules.get("test_lazy") == "the rule"
    del dce_rules["test_lazy"]


def test_every_name_of_the_public_api_exists():
    assert [name for name in extend.__all__ if not hasattr(extend, name)] == []
    assert len(set(extend.__all__)) == len(extend.__all__)


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(extend.__path__)])
def test_every_name_of_a_submodule_of_the_public_api_exists(name):
    module = importlib.import_module(f"jaxprtool.extend.{name}")
    assert module.__doc__ and f"`extend.{name}`" in extend.__doc__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@on_one_release
def test_the_public_api_imports_only_what_all_extensions_need():
    code = "import sys, jaxprtool.extend; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in run.stdout.split() if name.startswith("jaxprtool.")}
    assert rooms == {"errors", "extend", "ir", "jaxcompat", "passes", "primitives", "registry"}
    assert {name for name in run.stdout.split() if name.startswith("jaxprtool.passes.")} == {
        "jaxprtool.passes.cleanup",
        "jaxprtool.passes.cleanup.dce",
    }


def late_primitive(name):
    late_p = Primitive(name)
    late_p.def_impl(lambda x: x)
    late_p.def_abstract_eval(lambda x: x)
    return late_p, jaxprtool.trace(lambda x: jax.jit(late_p.bind)(x) + 1, X)


def test_a_rule_added_after_cleaning_a_program_is_used():
    late_p, program = late_primitive("test_late_dce")
    unused = extend.jaxpr_as_fun(program.jaxpr)
    program = jaxprtool.trace(lambda x: jax.lax.cond(True, lambda: unused(x), lambda: unused(x)), X)
    assert count(program.apply("dce"), late_p.name) == 1
    asked = []

    @extend.rule("dce", late_p.name)
    def _(used_outputs, live_inputs, eqn):
        asked.append(eqn)
        return [True], eqn

    program.apply("dce")
    assert asked


def test_a_rule_added_after_batching_a_program_is_used():
    late_p, program = late_primitive("test_late_batch")
    batching.primitive_batchers[late_p] = lambda operands, dims: (late_p.bind(*operands), *dims)
    assert count(program.apply("batch(axis_size=3)"), late_p.name) == 1

    @extend.rule("batch", late_p.name)
    def _(axis, primitive, operands, dims, params):
        return jnp.negative(*operands), *dims

    assert count(program.apply("batch(axis_size=3)"), "neg") == 1


def test_a_trait_added_after_merging_a_program_is_used():
    late_p = Primitive("test_late_trait")
    late_p.def_impl(lambda x: x)
    late_p.def_abstract_eval(lambda x: x)
    call = jax.jit(late_p.bind)
    program = jaxprtool.trace(lambda x: call(x) + call(x), X)
    assert count(program.apply("cse"), "jit") == 1
    extend.add_traits(late_p.name, may_merge=False)
    assert count(program.apply("cse"), "jit") == 2


@pytest.mark.parametrize("name", extend.TABLES)
def test_tables_are_found_by_name(name, monkeypatch):
    marker = object()
    assert extend.rule(name, "test_rules")(marker) is marker
    module = __import__(extend.TABLES[name][0], fromlist=["_"])
    table = getattr(module, extend.TABLES[name][1])
    assert isinstance(table, extend.RuleTable) and table.pop("test_rules") is marker


def test_an_unknown_table_is_refused_with_a_hint():
    with pytest.raises(PluginError, match="unknown table of rules 'pyhton'") as caught:
        extend.rule("pyhton", "sin")
    assert "python" in caught.value.hint
