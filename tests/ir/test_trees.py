"""Tree structures as plain data: made again they are the same."""

from collections import OrderedDict, defaultdict, namedtuple

import jax
import pytest

from jaxprtool.ir.trees import Opaque, build, describe, same_tree

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
def test_builtin_structures_are_made_again_as_they_were(value):
    tree = jax.tree.structure(value)
    assert build(describe(tree)) == tree


@pytest.mark.parametrize("value", [Pair(1, 2), Layer((1, 2), 3), defaultdict(list, a=1)])
def test_an_opaque_node_stands_for_one_of_a_type_that_is_not_at_hand(value):
    tree = jax.tree.structure((value, 4))
    again = build(describe(tree))
    assert again != tree
    assert same_tree(again, tree) and same_tree(tree, again)
    assert again.num_leaves == tree.num_leaves
    assert isinstance(jax.tree.unflatten(again, range(again.num_leaves))[0], Opaque)
    assert describe(again) == describe(tree)


def test_custom_nodes_are_told_apart_by_type_and_data():
    trees = [jax.tree.structure(v) for v in (Layer(1, 2), Layer(1, 3), Pair(1, 2), (1, 2), [1, 2])]
    for i, a in enumerate(trees):
        for j, b in enumerate(trees):
            assert same_tree(a, b) == (i == j)


def test_long_data_are_cut_and_still_told_apart():
    a, b = (jax.tree.structure(Layer(1, tuple(range(n)))) for n in (1000, 1001))
    assert not same_tree(a, b)
    assert len(describe(a).aux) < 200


def test_a_dict_whose_keys_are_no_literals_is_opaque():
    keyed = jax.tree.structure({frozenset({1}): 2})
    assert describe(keyed).type_name == "builtins.dict"
