"""`--args` for the program after passes, if the function's types are known without them."""

import json
import textwrap

import numpy as np
import pytest

import jaxprtool
from tests.share import first_and_proofs

TRAINING = """
    import jax, jax.numpy as jnp, jaxprtool

    def score(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.square(jax.nn.softmax(hidden @ hidden.T) @ hidden - x).sum()

    def loss(params, x: "f32[n,4]"):
        return score(params, x)

    @jaxprtool.example({"b": "f32[4]", "w": "f32[4,4]"}, "f32[n,4]", flag=jaxprtool.static(True))
    def exampled(params, x, *, flag):
        return score(params, x) if flag else -score(params, x)

    def bare(params, x, scale=1.0):
        return scale * score(params, x)

    def weighted(params, x: "f32[n,4]", weight: "f32[]"):
        return weight * score(params, x)

    def both(x: "f32[n,4]", y: "f32[n]", z: "f32[m]"):
        return (x.sum(1) * y).sum() + z.max()

    def flags(x: "f32[n,4]", flip, scale=1.0):
        return -x.sum() * scale if flip else x.sum() * scale

    batch = jaxprtool.Ragged.of([jnp.ones((n, 4)) for n in (3, 0, 5)], rows=16)
    given = {"w": jnp.eye(4), "b": jnp.zeros(4)}
"""

LENGTHS = [3, 1, 5]
BOTH = "load('params.npz'), load('batch.npz')"
RAGGED = "ragged(axis='n', lanes=3)"


def examples():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, 4)).astype(np.float32) for n in LENGTHS]


PARAMS = {"w": np.eye(4, dtype=np.float32) / 2, "b": np.arange(4, dtype=np.float32)}


def score(x):
    hidden = np.tanh(x @ PARAMS["w"] + PARAMS["b"])
    weights = np.exp(hidden @ hidden.T)
    return np.square(weights / weights.sum(-1, keepdims=True) @ hidden - x).sum()


@pytest.fixture
def files(folder):
    (folder / "train.py").write_text(textwrap.dedent(TRAINING))
    batch = jaxprtool.Ragged.of(examples())
    np.savez(folder / "batch.npz", values=batch.values, lengths=batch.lengths)
    np.savez(folder / "params.npz", **PARAMS)
    padded = np.concatenate([examples()[2], np.full((11, 4), np.nan, np.float32)])
    np.save(folder / "padded.npy", padded)
    np.save(folder / "short.npy", examples()[2])
    np.save(folder / "weights.npy", np.arange(1, 4, dtype=np.float32))
    return folder


@pytest.fixture
def results(cli, files):
    """Return the results of a function, by name."""

    def run(target, passes, args, *more):
        found = cli(
            "run", target, "-p", passes, "--args", args, "--repeat", "0", "--save", "o.npz", *more
        )
        assert found.code == 0, found.err
        assert "random" not in found.err
        with np.load(files / "o.npz") as saved:
            return dict(saved)

    return run


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("train.py:loss", ()),
        ("train.py:exampled", ()),
        ("train.py:bare", ("--types", "x=f32[n,4]")),
        ("train.py:bare", ("--types", "{'w': f32[4,4], 'b': f32[4]}, f32[n,4]")),
    ],
)
@pytest.mark.parametrize(
    "args",
    first_and_proofs(
        [
            BOTH,
            "params=load('params.npz'), x=load('batch.npz')",
            "load('params.npz'), load('batch.npz')['values'], load('batch.npz')['lengths']",
            "load('params.npz'), load('batch.npz')['values'], [3, 1, 5]",
            "load('params.npz'), {'values': load('batch.npz')['values'], 'lengths': [3, 1, 5]}",
        ]
    ),
)
def test_a_file_with_values_and_lengths_is_a_batch(results, target, more, args):
    found = results(target, RAGGED, args, *more)["result"]
    assert np.allclose(found, list(map(score, examples())), rtol=1e-5)


@pytest.mark.proof
def test_a_parameter_may_have_a_value_per_example(results):
    passes = "ragged(axis='n', lanes=3, in_axes=(None, 0, 0))"
    found = results("train.py:weighted", passes, f"{BOTH}, load('weights.npy')")["result"]
    assert np.allclose(found, [n * score(x) for n, x in enumerate(examples(), 1)], rtol=1e-5)


@pytest.mark.proof
def test_sizes_of_mask_are_arguments_and_padding_has_no_effect(results):
    args = "load('params.npz'), load('padded.npy')"
    for target in "train.py:loss", "train.py:exampled":
        for size in "5", "n=5":
            found = results(target, "mask(n=16)", f"{args}, {size}")["result"]
            assert np.allclose(found, score(examples()[2]), rtol=1e-5)
    assert set(results("train.py:loss", "mask(n=16), grad", f"{args}, 5")) == {
        "result['b']",
        "result['w']",
    }


@pytest.mark.proof
def test_a_static_argument_belongs_to_the_function(results):
    expected = list(map(score, examples()))
    found = results("train.py:exampled", RAGGED, f"{BOTH}, flag=static(False)")["result"]
    assert np.allclose(found, [-each for each in expected], rtol=1e-5)
    found = results("train.py:flags", RAGGED, "load('batch.npz'), static(True)")["result"]
    assert np.allclose(found, [-x.sum() for x in examples()], rtol=1e-4)
    found = results(
        "train.py:flags", RAGGED, "load('batch.npz'), True, scale=2.", "--static-argnums", "1"
    )
    assert np.allclose(found["result"], [-2 * x.sum() for x in examples()], rtol=1e-4)


def test_batch_takes_batched_values_if_types_are_given(results):
    lanes = "load('params.npz'), ones(f32[2,3,4])"
    types = "params={'w': f32[4,4], 'b': f32[4]}, x=f32[3,4]"
    found = results("train.py:bare", "batch((None, 0), axis_size=2)", lanes, "--types", types)
    assert np.allclose(found["result"], score(np.ones((3, 4), np.float32)), rtol=1e-5)


def test_several_ragged_arguments_share_lengths_while_others_have_their_own(results, files):
    m = jaxprtool.Ragged.of([np.arange(n, dtype=np.float32) for n in (2, 1, 4)])
    np.savez(files / "m.npz", values=m.values, lengths=m.lengths)
    ys = jaxprtool.Ragged.of([np.ones(n, np.float32) for n in LENGTHS])
    np.savez(files / "y.npz", values=ys.values, lengths=ys.lengths)
    args = "load('batch.npz'), load('y.npz'), load('m.npz')"
    found = results("train.py:both", "ragged(axis=('n', 'm'), lanes=3)", args)["result"]
    tops = (1, 0, 3)
    assert np.allclose(
        found, [x.sum() + top for x, top in zip(examples(), tops, strict=True)], 1e-4
    )


def test_a_ragged_array_of_the_module_may_have_unused_rows(results):
    found = results("train.py:bare", RAGGED, "ref('given'), ref('batch')", "--types", "x=f32[n,4]")
    # All rows are ones, and so are the results of attention in tanh(1).
    row = 4 * (1 - np.tanh(1)) ** 2
    assert np.allclose(found["result"], [3 * row, 0, 5 * row], rtol=1e-5)


def test_a_program_file_takes_batched_arguments_too(cli, files):
    cli("opt", "train.py:loss", "--args", "{'w': f32[4,4], 'b': f32[4]}, f32[n,4]", "-o", "p.jaxpr")
    direct = cli("run", "p.jaxpr", "-p", RAGGED, "--args", BOTH, "--json")
    cli("opt", "p.jaxpr", "-p", RAGGED, "-o", "r.jaxpr")
    after = cli("run", "r.jaxpr", "--args", BOTH, "--json")
    assert json.loads(direct.out)["outputs"] == json.loads(after.out)["outputs"]


@pytest.mark.proof
def test_types_before_the_passes_are_kept(cli, files):
    given = "{'w': f32[4,4], 'b': f32[4]}, f32[n,4]"
    for target in "train.py:loss", "train.py:exampled", "train.py:bare":
        more = "flag=static(True)" if target.endswith("exampled") else ""
        found = cli("run", target, "-p", "mask(n=16)", "--args", f"{given}, {more}")
        assert found.code == 0
        assert "params['b'], params['w'], x, n filled with random values" in found.err
    found = cli(
        "run", "train.py:loss", "-p", "grad", "--args", "load('params.npz'), ones(f32[3,4])"
    )
    assert found.code == 0 and "random" not in found.err
    # A value of one batch element: without --types it is an argument of the function.
    found = cli(
        "run",
        "train.py:loss",
        "-p",
        "batch(axis_size=2)",
        "--args",
        BOTH.replace("batch.npz')", "short.npy')"),
    )
    assert "do not fit after the passes" in found.err


@pytest.mark.parametrize(
    ("target", "passes", "args", "message"),
    [
        ("loss", RAGGED, "load('params.npz'), load('short.npy')", "lengths is missing"),
        ("loss", "ragged(axis='n', lanes=4)", BOTH, "argument 'lengths' has shape [3]"),
        ("loss", "ragged(axis='m', lanes=3)", BOTH, "no symbol 'm'"),
        ("loss", RAGGED, f"{BOTH}, ones(i32[3])", "takes 3 positional arguments, not 4"),
        (
            "loss",
            RAGGED,
            f"{BOTH}, lengths=ones(i32[3])",
            "argument 'lengths' is given twice: by itself, and",
        ),
        (
            "loss",
            "mask(n=16)",
            BOTH,
            "argument 'x' has values and lengths, but loss takes f32[16,4]",
        ),
        (
            "loss",
            "mask(n=16)",
            "load('params.npz'), load('padded.npy'), 17",
            "but must be a size from 0 to",
        ),
        (
            "loss",
            "mask(n=16)",
            "load('params.npz'), load('short.npy'), 5",
            "hint: pad it, and pass",
        ),
        (
            "loss",
            RAGGED,
            "load('params.npz'), {'values': ones(f32[3,3]), 'lengths': arange(3)}",
            "hint: the arguments after the passes are params, x: f32[N,4], lengths: i32[3] of N "
            "rows",
        ),
        (
            "loss",
            "mask(buckets=(8, 16))",
            "load('params.npz'), load('padded.npy'), 5",
            "returned n8, n16",
        ),
        (
            "bare",
            "mask(n=16)",
            "ref('given'), load('padded.npy')",
            "hint: it has no symbols; trace it with a type",
        ),
        (
            "loss",
            RAGGED,
            "load('params.npz'), {'values': ones(f32[9,4]), 'lengths': arange(3)}",
            "adds up to 3, but there are 9 rows",
        ),
        (
            "loss",
            RAGGED,
            "load('params.npz'), {'values': ones(f32[9,4]), 'lengths': [3, 1, -5]}",
            "argument 'lengths' of loss is -5 at [2]",
        ),
        (
            "loss",
            RAGGED,
            "load('params.npz'), {'values': ones(f32[9,4]), 'lengths': [3, 1.5, 5]}",
            "lengths must be whole numbers of rows, not [3, 1.5, 5]",
        ),
        (
            "loss",
            RAGGED,
            "load('params.npz'), {'values': ones(f32[9,4]), 'lengths': 9}",
            "lengths of examples of different lengths is not an array, but int",
        ),
        (
            "both",
            "ragged(axis=('n', 'm'), lanes=3)",
            "load('batch.npz'), {'values': ones(f32[3]), 'lengths': ones(i32[3])}, ones(f32[3])",
            "the lengths of argument 'y' differ from those of earlier arguments",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_a_one_line_error(cli, files, target, passes, args, message):
    found = cli("run", f"train.py:{target}", "-p", passes, "--args", args)
    assert found.code == 2 and found.out == ""
    assert message in found.err and found.err.count("error: ") == 1, found.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--types", "y=f32[n]"), "types has 'y', which is not a parameter"),
        (("--types", "x=f32[n"), "'[' in types is not closed"),
        (("--types", "x=f32[n,3]"), "bare raised TypeError"),
    ],
)
def test_types_that_do_not_fit_are_a_one_line_error(cli, files, more, message):
    found = cli("run", "train.py:bare", "-p", RAGGED, "--args", BOTH, *more)
    assert found.code in (2, 3) and message in found.err, found.err


def test_an_error_explains_how_to_give_unknown_types(cli, files):
    found = cli("run", "train.py:bare", "-p", RAGGED, "--args", BOTH)
    assert found.code == 3 and "hint: --args apply to the function; with --types" in found.err


def test_a_program_has_its_own_types(cli, files):
    cli("opt", "train.py:exampled", "-o", "p.jaxpr")
    found = cli("run", "p.jaxpr", "--types", "x=f32[n,4]")
    assert found.code == 2 and "--types applies to functions" in found.err


def test_opt_verifies_with_batched_arguments(cli, files, monkeypatch):
    from jaxprtool.commands.compare import requested

    seen, real = [], requested.random_runs

    def noted(program, given):
        runs = real(program, given)
        seen.append(runs.inputs)
        return runs

    monkeypatch.setattr(requested, "random_runs", noted)
    found = cli(
        "opt", "train.py:loss", "-p", f"{RAGGED}, dce, simplify", "--verify", "--args", BOTH
    )
    assert found.code == 0 and "verified: 2 passes" in found.err
    assert seen == ["the given values"]
    found = cli("opt", "train.py:loss", "-p", "mask(n=16), dce", "--verify", "--args", BOTH)
    assert found.code == 2 and "has values and lengths" in found.err


def test_a_whole_file_is_traced(cli, files):
    found = cli("opt", "train.py:loss", "--args", "load('params.npz'), f32[3,4]")
    assert "{ lambda ; a:f32[4] b:f32[4,4] c:f32[3,4]. let" in found.out


def test_types_of_all_parameters_are_those_of_the_function(cli, folder):
    code = "def sine(x): return jnp.sin(x)\ndef half(x, y): return (x - y) / 2"
    (folder / "plain.py").write_text(f"import jax.numpy as jnp\n{code}")
    moved = "run", "plain.py:sine", "-p", "jvp", "--types", "x=f32[]", "--args", "(0.1,), (0.2,)"
    assert "d_result: f32[] 0.19900084" in cli(*moved).out
    types = "--types", "x=f32[], y=f32[]", "--args", "1.0"
    found = cli("run", "plain.py:half", "-p", "linear_transpose", *types)
    assert "result[0]: f32[] 0.5" in found.out and "result[1]: f32[] -0.5" in found.out


def test_types_alone_bind_positional_parameters_by_position(cli, folder):
    code = "def half(x, y, *, n=2.0): return (x - y) / n"
    (folder / "plain.py").write_text(code)
    types = "--types", "x=f32[], y=f32[], n=f32[]"
    for passes in (
        "grad(argnums=1)",
        "batch(in_axes=(0, None), axis_size=2)",
        "jit(donate_argnums=0)",
    ):
        found = cli("opt", "plain.py:half", "-p", passes, *types)
        assert found.code == 0 and "{ lambda ; a:" in found.out
    found = cli("opt", "plain.py:half", "--types", "y=f32[]")
    assert found.code == 2 and "missing a required argument: 'x'" in found.err
