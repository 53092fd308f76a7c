"""What `bench` measures. Times themselves are never compared."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.bench.bench import (
    LEAST,
    Interval,
    RoundLimits,
    TurnsHere,
    isolated_turns,
    median_interval,
    paired_ratio,
    read_baseline,
    rounds,
    unpaired_ratio,
    with_baseline,
)
from jaxprtool.commands.compare.variants import Variant
from jaxprtool.errors import ArgumentsError, BackendError, PipelineError, UnsupportedError
from jaxprtool.ir.documents import as_json
from tests.share import on_one_release

X = jnp.arange(4.0)


class Clock:
    """A variant whose turns take the given seconds, one per round."""

    def __init__(self, name, turns, seconds):
        self.name, self.turns, self.seconds = name, turns, iter(seconds)

    def turn(self):
        self.turns.append(self.name)
        return next(self.seconds)


def silent(doing):
    pass


@pytest.mark.proof
def test_the_interval_of_a_median_is_that_of_the_sign_test():
    # Of 20 values, the 6th and the 15th enclose the median with 95.9 %: 1 - 2 P(B(20, 1/2) < 6).
    found = median_interval(list(range(1, 21)))
    assert found == Interval(10.5, 6, 15) and found.precision == pytest.approx(4.5 / 10.5)
    assert median_interval([3.0] * LEAST) == Interval(3, 3, 3)


@pytest.mark.proof
def test_intervals_contain_the_true_ratio_as_often_as_they_should():
    random = np.random.default_rng(0)
    truth, hits = 1.0, {"alone": 0, "paired": 0, "unpaired": 0}
    for _ in range(200):
        drift = 1 + 0.5 * np.sin(np.arange(30) / 3)  # slows both by the same factor
        a, b = random.lognormal(0, 0.1, (2, 30))
        found = median_interval(a), paired_ratio(a * drift, b * drift), unpaired_ratio(a, b)
        for name, each in zip(hits, found, strict=True):
            hits[name] += each.low <= truth <= each.high
    assert hits["alone"] / 200 > 0.93 and 0.93 < hits["paired"] / 200 < 0.99
    assert hits["unpaired"] / 200 > 0.95


def test_drift_cancels_within_pairs_but_not_between_runs():
    fast, slow = [1.0] * 10 + [3.0] * 10, [1.1] * 10 + [3.3] * 10
    paired = paired_ratio(slow, fast)
    assert paired.low == pytest.approx(1.1) and paired.high == pytest.approx(1.1)
    assert unpaired_ratio(slow, fast).precision > 0.5


def test_all_variants_take_a_turn_in_each_round_in_varying_order():
    turns = []
    times = rounds([Clock(n, turns, range(1, 100)) for n in "abc"], RoundLimits(40), silent)
    assert list(map(len, times)) == [40] * 3
    orders = ["".join(turns[i : i + 3]) for i in range(0, 120, 3)]
    assert set(map("".join, map(sorted, orders))) == {"abc"} and len(set(orders)) > 3


def test_rounds_end_when_all_intervals_are_precise_or_at_their_maximum():
    def steady():
        return iter([1.0, 1.001] * 1000)

    def noisy():
        return iter([1.0, 2.0] * 1000)

    def count(seconds, limits):
        return len(rounds([Clock("a", [], steady()), Clock("b", [], seconds)], limits, silent)[0])

    assert count(steady(), RoundLimits(None, 0.01)) == 10
    assert count(noisy(), RoundLimits(25, 0.01)) == 25
    assert count(steady(), RoundLimits(30)) == 30 and count(steady(), RoundLimits()) == 50


def test_short_calls_are_timed_in_batches_and_long_ones_individually():
    def long(x):
        return jax.lax.fori_loop(0, 20, lambda i, x: jnp.sin(x @ x), x)

    short = TurnsHere(Variant("f", jaxprtool.trace(lambda x: x * 2, X)), [X])
    assert short.start().calls > 5 and short.turn() < 1
    big = jnp.ones((200, 200))
    assert TurnsHere(Variant("g", jaxprtool.trace(long, big)), [big]).start().calls == 1


def test_donated_arguments_are_copied_for_each_call():
    program = jaxprtool.trace(jax.jit(lambda x: x + 1, donate_argnums=0), X)
    found = jaxprtool.bench(program, (X,), repeat=7)
    assert len(found.variants[0].seconds) == 7 and not X.is_deleted()


def test_effects_are_refused_unless_their_number_is_given():
    seen = []

    def f(x):
        jax.debug.callback(lambda v: seen.append(v), x)
        return x

    program = jaxprtool.trace(f, X)
    with pytest.raises(UnsupportedError, match="f has effects, which every call would repeat"):
        jaxprtool.bench(program, (X,))
    assert seen == []
    jaxprtool.bench(program, (X,), repeat=7)
    assert len(seen) == 8


@pytest.mark.proof
def test_every_quantity_of_a_variant_is_measured():
    program = jaxprtool.trace(lambda x: jnp.tanh(x @ x).sum(), jnp.ones((8, 8)))
    found = jaxprtool.bench(program, passes=["", "-O1"], repeat=8)
    traced, optimized = found.variants
    assert (traced.name, optimized.name) == ("as traced", "-O1") and found.rounds == 8
    assert traced.passes_seconds == 0 < optimized.passes_seconds
    for each in found.variants:
        assert each.low_seconds <= each.median_seconds <= each.high_seconds
        assert min(each.lower_seconds, each.compile_seconds, each.first_call_seconds) > 0
        assert each.memory.arguments == 256 and each.trace_seconds is None
    (ratio,) = found.ratios
    assert (ratio.of, ratio.to) == ("-O1", "as traced") and ratio.low <= ratio.ratio <= ratio.high
    assert ratio.differs == (not ratio.low <= 1 <= ratio.high)
    assert found.random == ("x",) and found.arguments == ("x: f32[8,8]",)
    assert set(as_json(found)["ratios"][0]) >= {"of", "to", "ratio", "low", "high"}


def test_results_may_differ_and_arguments_may_not():
    loss = jaxprtool.trace(lambda x: (x * x).sum(), X)
    found = jaxprtool.bench(loss, passes=["", "value_and_grad"], repeat=7)
    assert len(found.ratios) == 1
    other = jaxprtool.trace(lambda x: x, jnp.ones(3))
    with pytest.raises(ArgumentsError, match=r"takes different arguments: x: f32\[3\]"):
        jaxprtool.bench([loss, other])


@on_one_release
def test_isolated_variants_are_measured_like_others_and_a_crash_is_one_line():
    program = jaxprtool.trace(lambda key, x: x * jax.random.normal(key, x.shape), KEY, X)
    found = jaxprtool.bench(program, (KEY, X), passes=["", "dce"], repeat=7, isolate=True)
    assert found.isolated and found.devices == (str(jax.local_devices()[0]),)
    assert [len(each.seconds) for each in found.variants] == [7, 7] and found.ratios
    assert found.variants[0].memory.outputs == 16


KEY = jax.random.key(0)


@pytest.mark.usefixtures("processes")
def test_errors_in_another_process_are_reported_in_one_line(monkeypatch, tmp_path):
    def running(program):
        variant = Variant("f", program)
        return isolated_turns(variant, [X])

    def f(x):
        return jnp.broadcast_to(x[0], (1 << 22, 1 << 22))

    with (
        running(jaxprtool.trace(f, X)) as turns,
        pytest.raises(BackendError, match="f failed while it ran: RESOURCE_EXHAUSTED"),
    ):
        turns.start()
    (tmp_path / "sitecustomize.py").write_text("import os, signal; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        running(jaxprtool.trace(lambda x: x, X)) as turns,
        pytest.raises(UnsupportedError, match="f crashed: SIGSEGV"),
    ):
        turns.start()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"repeat": 6}, ArgumentsError, "6 rounds are too few"),
        ({"precision": 0.0}, ArgumentsError, "between 0 and 1, not 0.0"),
        ({"precision": 5}, ArgumentsError, "between 0 and 1, not 5"),
        ({"args": (X, X)}, ArgumentsError, "takes 1 arrays, not 2"),
        ({"backend": "abacus"}, BackendError, "no backend 'abacus'"),
        ({"passes": "linearize"}, PipelineError, "a variant is one program"),
    ],
)
def test_invalid_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        jaxprtool.bench(jaxprtool.trace(lambda x: jnp.sin(x).sum(), X), **options)
    with pytest.raises(ArgumentsError, match="sin is not a Program"):
        jaxprtool.bench(jnp.sin)


@pytest.fixture(scope="module")
def found():
    return jaxprtool.bench(jaxprtool.trace(lambda x: x * 2, X), passes=["", "dce"], repeat=12)


def saved(found, folder):
    path = folder / "base.json"
    path.write_text(json.dumps(as_json(found)))
    return read_baseline(str(path))


def slowed(found, times):
    variants = [
        replace(each, seconds=tuple(times * second for second in each.seconds))
        for each in found.variants
    ]
    return replace(found, variants=tuple(variants))


def test_each_variant_has_a_ratio_to_its_own_baseline(found, tmp_path):
    then = saved(found, tmp_path)
    same, slow = (with_baseline(slowed(found, times), then).baseline for times in (1, 100))
    assert [each.of for each in same.ratios] == ["as traced", "dce"]
    assert all(each.ratio == 1 and not each.differs for each in same.ratios)
    assert all(each.ratio == pytest.approx(100) and each.differs for each in slow.ratios)
    assert same.mismatches == () == same.missing


def test_a_baseline_of_another_machine_or_release_is_reported(found, tmp_path):
    machine = replace(found.machine, jax="0.9.0", processor="abacus")
    then = saved(replace(found, machine=machine, variants=found.variants[:1]), tmp_path)
    compared = with_baseline(found, then).baseline
    processor, release = compared.mismatches
    assert processor.startswith("the processor was abacus, and is ")
    assert release == f"the release of JAX was 0.9.0, and is {jax.__version__}"
    assert compared.missing == ("dce",) and len(compared.ratios) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "a baseline of the program other, not"),
        ({"arguments": ("x: f32[5]",)}, r"other arguments: x: f32\[5\], where"),
        ({"arguments": ()}, "other arguments: nothing, where"),
        ({"variants": ()}, "has no variant as traced, dce"),
    ],
)
def test_a_baseline_of_another_program_is_refused(found, tmp_path, change, message):
    with pytest.raises(ArgumentsError, match=message):
        with_baseline(found, saved(replace(found, **change), tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a baseline"),
        (
            '{"name": "f", "arguments": [], "variants": [{"name": "f", "seconds": [1.0]}],'
            ' "machine": {"processor": "", "devices": "", "jax": ""}}',
            "has fewer than 7 rounds",
        ),
    ],
)
def test_a_file_that_is_not_a_baseline_is_refused(tmp_path, text, message):
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(ArgumentsError, match=message):
        read_baseline(str(path))
    with pytest.raises(ArgumentsError, match="cannot read"):
        read_baseline(str(tmp_path / "none.json"))
