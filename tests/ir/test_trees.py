"""Tree structures as plain data, from which equal structures are rebuilt."""

import collections
import dataclasses
import functools
from collections import OrderedDict, defaultdict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.trees import (
    LEAF,
    Opaque,
    build_tree,
    describe,
    filled,
    leaf_paths,
    same_tree,
    structure,
)

Pair = namedtuple("Pair", "first second")


@jax.tree_util.register_pytree_node_class
class Layer:
    def __init__(self, weights, size):
        self.weights, self.size = weights, size

    def tree_flatten(self):
        return (self.weights,), self.size

    @classmethod
    def tree_unflatten(cls, size, children):
        return cls(*children, size)


@pytest.mark.parametrize(
    "value",
    [
        1,
        None,
        (),
        (1, [2, None], {"b": 1, "a": {}}),
        {1: 2, 3: 4},
        {("a", 0): 2},
        OrderedDict(z=1, y=(2,)),
    ],
)
def test_builtin_structures_are_rebuilt(value):
    tree = jax.tree.structure(value)
    assert build_tree(describe(tree)) == tree


@pytest.mark.parametrize("value", [Pair(1, 2), Layer((1, 2), 3), defaultdict(list, a=1)])
def test_an_opaque_node_stands_for_a_type_that_is_unavailable(value):
    tree = jax.tree.structure((value, 4))
    again = build_tree(describe(tree))
    assert again != tree
    assert same_tree(again, tree) and same_tree(tree, again)
    assert again.num_leaves == tree.num_leaves
    assert isinstance(jax.tree.unflatten(again, range(again.num_leaves))[0], Opaque)
    assert describe(again) == describe(tree)


def test_custom_nodes_are_distinguished_by_type_and_data():
    trees = [jax.tree.structure(v) for v in (Layer(1, 2), Layer(1, 3), Pair(1, 2), (1, 2), [1, 2])]
    for i, a in enumerate(trees):
        for j, b in enumerate(trees):
            assert same_tree(a, b) == (i == j)


def test_long_data_are_truncated_and_still_distinguished():
    a, b = (jax.tree.structure(Layer(1, tuple(range(n)))) for n in (1000, 1001))
    assert not same_tree(a, b)
    assert len(describe(a).aux) < 200


def test_a_dict_with_non_literal_keys_is_opaque():
    keyed = jax.tree.structure({frozenset({1}): 2})
    assert describe(keyed).type_name == "builtins.dict"


@jax.tree_util.register_pytree_node_class
class Pairs:
    """A class that checks its children, as data sets do."""

    def __init__(self, x, y):
        if x.shape[0] != y.shape[0]:
            raise ValueError("as many x as y")
        self.x, self.y = x, y

    def tree_flatten(self):
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=["n"])
@dataclasses.dataclass
class CheckedFields:
    x: object
    y: object
    n: int = dataclasses.field(default=3, metadata={"static": True})

    def __post_init__(self):
        if self.x is None or self.x.shape[0] != self.y.shape[0]:
            raise ValueError("as many x as y")


class CheckedTuple(collections.namedtuple("CheckedTuple", "x y")):
    def __new__(cls, x, y):
        if x.shape[0] != y.shape[0]:
            raise ValueError("as many x as y")
        return super().__new__(cls, x, y)


@jax.tree_util.register_pytree_node_class
class Converting(Pairs):
    def __init__(self, x, y):
        self.x, self.y = jnp.asarray(x), jnp.asarray(y)


@jax.tree_util.register_pytree_node_class
class CheckedWhenFlattened(Pairs):
    def tree_flatten(self):
        assert self.x.shape[0] == self.y.shape[0]
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        made = object.__new__(cls)
        made.x, made.y = children
        return made


@jax.tree_util.register_pytree_node_class
class TakesArrays(Pairs):
    def __init__(self, x, y):
        if not isinstance(x, jax.Array):
            raise TypeError("x must be an array")
        super().__init__(x, y)


def fit(w, pairs):
    return jnp.mean((pairs.x @ w - pairs.y) ** 2)


CHECKING = [Pairs, CheckedFields, CheckedTuple, Converting, CheckedWhenFlattened, TakesArrays]


@pytest.mark.parametrize("cls", CHECKING)
def test_a_class_that_checks_its_children_is_described_and_rebuilt_without_the_check(cls):
    tree = jax.tree.structure({"data": cls(jnp.ones((4, 3)), jnp.ones(4)), "w": 0})
    described = describe(tree)
    assert described.children[0].type_name.endswith(cls.__qualname__)
    assert described.children[0].children == (LEAF, LEAF)
    example = filled(tree, range(3))
    assert jax.tree.leaves(example) == [0, 1, 2]
    assert structure(example) == tree
    marked = structure(filled(tree, [None, 0, 0]))
    assert marked.num_leaves == 2 and marked.children()[0].node_data()[0] is cls


def test_the_fields_of_a_self_checking_dataclass_are_known():
    tree = jax.tree.structure(CheckedFields(jnp.ones(2), jnp.ones(2)))
    assert describe(tree).keys == (".x", ".y")
    assert leaf_paths(tree) == ["x", "y"]


@pytest.mark.parametrize("cls", CHECKING)
def test_a_program_with_a_self_checking_class_is_written_and_rewritten(cls):
    w, pairs = jnp.ones(3), cls(jnp.ones((4, 3)), jnp.arange(4.0))
    program = jaxprtool.trace(fit, w, pairs)
    again = parse_program(program_file_text(program), "fit")
    assert jaxprtool.equivalent(again, program)
    jaxprtool.verify(program, program.apply("-O2"), (w, pairs))
    np.testing.assert_allclose(again(w, pairs), fit(w, pairs), rtol=1e-6)
    module = {}
    exec(jaxprtool.to_python(program), module)
    np.testing.assert_allclose(module["fit"](w, pairs), fit(w, pairs), rtol=1e-6)
    for passes in ("jvp", "closed({0: [1., 1., 1.]})", "batch(in_axes=(0, None), axis_size=2)"):
        made = program.apply(passes)
        assert jaxprtool.equivalent(parse_program(program_file_text(made), "made"), made)
    with pytest.raises(TypeError, match=f"pairs must be a {cls.__name__}"):
        program(w, w)


@pytest.mark.parametrize("cls", CHECKING)
def test_a_result_may_have_a_self_checking_class(cls):
    def doubled(pairs):
        return cls(pairs.x * 2, pairs.y), pairs.y.sum()

    pairs = cls(jnp.ones((4, 3)), jnp.arange(4.0))
    for fun in (doubled, jax.jit(doubled)):
        program = jaxprtool.trace(fun, pairs)
        for called in (program, program.apply("-O2"), jaxprtool.jit(fun)):
            made, total = called(pairs)
            assert type(made) is cls and made.x.sum() == 24 and total == 6
        assert jaxprtool.equivalent(parse_program(program_file_text(program), "doubled"), program)
