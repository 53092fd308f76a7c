"""`jaxprtool cost` shows the FLOPs and bytes of each line, and marks what is unknown."""

import json
import re
import textwrap

import jax
import pytest

from jaxprtool.jaxcompat.lowering import read_pprof

FUNCTIONS = """
    import jax
    import jax.numpy as jnp
    from jax import lax

    def loop(x, w):
        return lax.scan(lambda x, _: (w @ x, None), x, length=10)[0]

    def branch(i, x):
        return lax.cond(i > 0, jnp.sin, lambda x: x + x * x, x)

    def nearly(i, w):
        return lax.cond(i > 0, lambda w: w @ w, lambda w: (w @ w).at[0].add(1.0), w)

    def until(x):
        return lax.while_loop(lambda x: x.sum() < 5, lambda x: x + 1, x)

    def pop(heap, indices):
        def step(heap, i):
            return heap.at[i].set(0.0), heap[i]
        return lax.scan(step, heap, indices)
"""

LOOP = "cost", "costs.py:loop", "--args", "f32[512], f32[512,512]"


@pytest.fixture(autouse=True)
def costs(folder):
    (folder / "costs.py").write_text(textwrap.dedent(FUNCTIONS))


def test_a_table_has_the_users_lines_with_their_source(cli):
    found = cli(*LOOP)
    assert found.code == 0 and found.out.startswith("loop: 5.2 MFLOP, 10.0 MiB\n")
    assert "100.0%   5.2 M   10.0 MiB       0.5   costs.py:7" in found.out
    assert "return lax.scan(lambda x, _: (w @ x, None" in found.out


def test_json_has_the_total_and_the_groups(cli):
    found = json.loads(cli(*LOOP, "--by", "primitive", "--json").out)
    assert found["total"]["flops"] == 5_242_880
    assert found["groups"][0]["name"] == "dot_general"
    assert found["programs"][0]["total"] == found["total"]
    fields = {"flops", "transcendentals", "bytes_read", "bytes_written"}
    assert fields < found["total"].keys() and fields < found["groups"][0].keys()


def test_branches_are_ranges_and_unknown_iteration_counts_are_marked(cli):
    found = cli("cost", "costs.py:branch", "--args", "i32[], f32[100]", "--by", "primitive")
    assert "transcendentals" in found.out and "0 to 100" in found.out
    found = cli("cost", "costs.py:until", "--args", "f32[100]")
    assert "199*" in found.out or "200*" in found.out
    assert "* counts one iteration of each loop whose number of iterations is unknown" in found.out


def test_a_range_whose_ends_round_to_the_same_number_is_one_number(cli):
    found = cli("cost", "costs.py:nearly", "--args", "i32[], f32[200,200]")
    assert found.out.startswith("nearly: 16.0 MFLOP, ")
    assert "16.0 M to" not in found.out


def test_with_a_device_rows_have_times(cli):
    found = cli(*LOOP, "--device", "a100", "--seconds", "0.001")
    assert "min time" in found.out and "memory" in found.out
    assert "on a100: at least 5.16 µs, limited by memory" in found.out
    assert "in 1 ms: 5.2 GFLOP/s, 0.0% of the peak of a100" in found.out


def test_with_measure_the_program_is_run(cli):
    found = cli(*LOOP, "--measure")
    assert found.code == 0 and re.search(r"^in [\d.]+ \S+: [\d.]+ .?FLOP/s$", found.out, re.M)
    found = json.loads(cli(*LOOP, "-p", "vjp", "--measure", "--json").out)
    assert [0 < each["seconds"] < 100 for each in found["programs"]] == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "1", "--measure"], "cannot be combined"),
        (["--device", "a10"], "unknown device 'a10'"),
        (["--top", "0"], "--top"),
        (["--by", "file"], "--by"),
    ],
)
def test_mistakes_are_one_line_errors(cli, options, message):
    found = cli(*LOOP, *options)
    assert found.code == 2 and found.err.startswith("error: ") and message in found.err
    assert found.out == ""


def test_a_profile_has_the_stacks_and_the_total_of_the_table(cli, folder):
    assert cli(*LOOP, "--pprof", "cost.pb.gz").code == 0
    profile = json.loads(read_pprof((folder / "cost.pb.gz").read_bytes()))
    strings = profile["stringTable"]
    kinds = [strings[int(kind["type"])] for kind in profile["sampleType"]]
    assert kinds == ["flops", "transcendentals", "bytes"]
    assert strings[int(profile["defaultSampleType"])] == "flops"
    totals = [sum(int(row["value"][i]) for row in profile["sample"]) for i in range(3)]
    work = json.loads(cli(*LOOP, "--json").out)["total"]
    assert totals == [work["flops"], 0, work["bytes_read"] + work["bytes_written"]]
    names = {each["id"]: strings[int(each["name"])] for each in profile["function"]}
    lines = {each["id"]: each["line"][0] for each in profile["location"]}
    stacks = [
        [names[lines[place]["functionId"]] for place in row["locationId"]]
        for row in profile["sample"]
    ]
    assert ["dot_general", "loop.<locals>.<lambda>"] in [stack[:2] for stack in stacks]


def test_a_profile_needs_one_program_of_known_sizes(cli, folder):
    several = cli(*LOOP, "-p", "vjp", "--pprof", "cost.pb.gz")
    symbolic = cli("cost", "costs.py:until", "--args", "f32[n]", "--pprof", "cost.pb.gz")
    for found, message in (
        (several, "error: --pprof takes one program, but the passes returned "),
        (symbolic, "error: a profile needs sizes that are numbers"),
    ):
        assert found.code == 2 and found.out == "" and found.err.startswith(message)
    assert not (folder / "cost.pb.gz").exists()


def test_times_need_concrete_sizes(cli):
    found = cli("cost", "costs.py:until", "--args", "f32[n]", "--device", "h100")
    assert (found.code, found.err.splitlines()[0]) == (
        2,
        "error: a time estimate needs sizes that are numbers",
    )


LAYERS = """
import jax, jax.numpy as jnp, jaxprtool

@jaxprtool.example("f32[8,8]")
def stacked(x):
    for i in range(30):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("dense"):
                y = jnp.tanh(x @ x)
            x = x + y
    return x
"""


def test_layers_are_one_row_unless_all_scopes_are_shown(cli, folder):
    (folder / "stacked.py").write_text(LAYERS)
    first, second = cli("cost", "stacked.py:stacked", "--by", "scope").out.splitlines()[3:5]
    assert first.startswith("100.0%") and first.endswith("   layer_0..29")
    assert second.endswith("     dense")
    whole = cli("cost", "stacked.py:stacked", "--by", "scope", "--top", "60").out.splitlines()
    assert whole[3].endswith("   layer_0") and "".join(whole).count("dense") == 30


@pytest.fixture
def optimized():
    """Compile as users do: the tests disable most of XLA's optimizations."""
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)


POP = "cost", "costs.py:pop", "--args", "f32[100], i32[9]"


def test_compiled_for_one_device_it_counts_kernels_and_lists_copies(cli, optimized):
    found = cli(*POP, "--compiled", "--by", "kernel")
    assert found.code == 0 and "fusion" in found.out
    text = " ".join(found.out.split())
    assert "f32[100] carry of the loop at costs.py:21, at first heap" in text
    document = json.loads(cli(*POP, "--compiled", "--json").out)
    carried, entered = [c for c in document["programs"][0]["copies"] if "f32" in c["type"]]
    assert (carried["runs"], carried["bytes"], carried["place"]["line"]) == (18, 18 * 400, 20)
    assert entered["reason"] == "not donated" and entered["value"] == "heap"


def test_without_compiling_there_are_no_kernels(cli):
    found = cli(*POP, "--by", "kernel")
    assert found.code == 2 and "hint: add --compiled" in found.err
