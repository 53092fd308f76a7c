"""The minimum vertex cut is exact, and nearest the sink, for any graph."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from jaxprtool.passes.unzip.auto import SINK, SOURCE, FlowGraph

MANY = 1 << 80


def graph_of(costs, edges):
    """Return a graph of nodes 2, 3, ... with these costs."""
    graph = FlowGraph()
    for cost in costs:
        graph.add(cost)
    for start, end in edges:
        graph.link(start, end)
    return graph


def reaches_sink(edges, start, chosen):
    """Return True if a walk from `start` reaches the sink without entering a chosen node."""
    found, todo = set(start), list(start)
    while todo:
        node = todo.pop()
        for a, b in edges:
            if a == node and b not in found and b not in chosen:
                found.add(b)
                todo.append(b)
    return found


def brute_force(costs, edges):
    """Return the cost of the cheapest cut, and the cheapest cut that is nearest the sink."""
    nodes = range(2, len(costs) + 2)
    best, cuts = math.inf, []
    for count in range(len(costs) + 1):
        for chosen in itertools.combinations(nodes, count):
            cost = sum(costs[n - 2] for n in chosen)
            if cost == math.inf or cost > best:
                continue
            if SINK in reaches_sink(edges, {SOURCE}, chosen):
                continue
            cuts = cuts if cost == best else []
            best = cost
            cuts.append(chosen)
    backwards = [(b, a) for a, b in edges]
    left = {cut: reaches_sink(backwards, {SINK}, cut) for cut in cuts}
    return best, min(cuts, key=lambda cut: (len(left[cut]), len(cut)), default=None), left


def random_graph(seed, free=True):
    """Return costs, some of them equal, and edges, most of them forward, from source to sink."""
    rng = random.Random(seed)
    count = rng.randint(3, 9)
    kinds = [*range(0 if free else 1, 5), 2, 3, rng.choice((MANY, math.inf))]
    costs = [rng.choice(kinds) for _ in range(count)]
    nodes = range(2, count + 2)
    edges = {(SOURCE, n) for n in nodes if rng.random() < 0.4}
    edges |= {(n, SINK) for n in nodes if rng.random() < 0.4}
    density = rng.uniform(0.1, 0.5)
    for start, end in itertools.permutations(nodes, 2):
        if rng.random() < density * (1 if start < end else 0.15):
            edges.add((start, end))
    return costs, sorted(edges)


def check(costs, edges, graph):
    best, nearest, left = brute_force(costs, edges)
    if best == math.inf:
        with pytest.raises(ValueError, match="cannot be chosen"):
            graph.minimum_cut()
        return
    chosen = tuple(graph.minimum_cut())
    assert sum(costs[n - 2] for n in chosen) == best
    assert chosen in left
    if 0 not in costs:
        assert chosen == nearest
        assert all(left[chosen] <= other for other in left.values())


@pytest.mark.parametrize("part", range(8))
def test_the_cut_is_minimal_and_nearest_the_sink(part):
    for seed in range(100 * part, 100 * part + 100):
        costs, edges = random_graph(seed, free=seed % 4 == 0)
        check(costs, edges, graph_of(costs, edges))


@pytest.mark.sweep
def test_the_cut_is_minimal_and_nearest_the_sink_on_many_graphs():
    for seed in range(1000, 20_000):
        costs, edges = random_graph(seed, free=seed % 4 == 0)
        check(costs, edges, graph_of(costs, edges))


@pytest.mark.parametrize("part", range(4))
def test_reducing_a_part_changes_no_cut(part):
    """A part can be reduced with a fixed border, whatever it is joined to."""
    for seed in range(5000 + 100 * part, 5100 + 100 * part):
        costs, edges = random_graph(seed, free=False)
        rng = random.Random(seed)
        inner = {n for n in range(2, len(costs) + 2) if rng.random() < 0.6}
        border = {n for a, b in edges for n in (a, b) if (a in inner) != (b in inner)} & inner
        graph = graph_of(
            [c if n in inner else math.inf for n, c in enumerate(costs, start=2)],
            [(a, b) for a, b in edges if a in inner and b in inner],
        )
        given = {b for a, b in edges if b in inner and a not in inner}
        for node in given:
            graph.costs[node] = math.inf  # the cost of a border belongs to the larger graph
        graph.reduce(fixed=border)
        for node, cost in enumerate(costs, start=2):
            if node in given or node not in inner:
                graph.costs[node] = cost
        for a, b in edges:
            if not (a in inner and b in inner):
                graph.link(a, b)
        check(costs, edges, graph)


def test_costs_are_exact_beyond_machine_integers():
    a, b, c = 2, 3, 4
    for bonus, expected in ((0, [c]), (-1, [a, b])):
        costs = [2**100, 2**100 + 1 + bonus, 2**101 + 1]
        graph = graph_of(costs, [(SOURCE, a), (SOURCE, b), (a, c), (b, c), (c, SINK)])
        assert graph.minimum_cut() == expected


def test_a_cycle_is_cut_at_its_cheapest_node():
    start, carry, out = 2, 3, 4
    edges = [(SOURCE, start), (start, carry), (carry, out), (out, carry), (carry, SINK)]
    assert graph_of([1, 10, 10], edges).minimum_cut() == [start]
    assert graph_of([20, 10, 3], edges).minimum_cut() == [carry]


def test_nothing_is_chosen_if_nothing_leads_to_the_sink():
    assert graph_of([1, 1], [(SOURCE, 2), (2, 3)]).minimum_cut() == []


def test_an_edge_from_source_to_sink_cannot_be_cut():
    with pytest.raises(ValueError, match="cannot be chosen"):
        graph_of([], [(SOURCE, SINK)]).minimum_cut()


def chain_of_keys(count: int) -> tuple[list[int], list[tuple[int, int]], Sequence[int]]:
    """Return a chain of splits, each of which draws a weight: `key, sub = split(key)`."""
    costs, edges, weights = [MANY], [(SOURCE, 2)], []
    key = 2
    for i in range(count):
        pair, sub, noise, weight = (len(costs) + 2 + j for j in range(4))
        costs += [MANY, MANY, 4 * i + 4, 4 * i + 4]
        edges += [(key, pair), (pair, sub), (sub, noise), (noise, weight), (weight, SINK)]
        weights.append(weight)
        key = pair
    return costs, edges, weights


@pytest.mark.proof
def test_every_weight_of_a_deep_model_is_found():
    costs, edges, weights = chain_of_keys(20_000)
    assert graph_of(costs, edges).minimum_cut() == weights


@pytest.mark.proof
def test_a_large_grid_is_cut():
    width, height, rng = 40, 40, random.Random(0)
    costs = [rng.randint(1, 99) for _ in range(width * height)]
    place = {(i, j): 2 + i * height + j for i in range(width) for j in range(height)}
    edges = [(SOURCE, place[0, j]) for j in range(height)]
    edges += [(place[width - 1, j], SINK) for j in range(height)]
    for (i, j), node in place.items():
        edges += [(node, place[i + 1, k]) for k in (j - 1, j, j + 1) if (i + 1, k) in place]
    chosen = graph_of(costs, edges).minimum_cut()
    assert SINK not in reaches_sink(edges, {SOURCE}, set(chosen))
    assert sum(costs[n - 2] for n in chosen) < min(
        sum(costs[place[i, j] - 2] for j in range(height)) for i in range(width)
    )
