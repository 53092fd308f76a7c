"""Why a function was compiled again, in the user's terms."""

import functools
import json
import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.recording.describe import CacheKey
from jaxprtool.recording.reasons import difference_texts, nearest, reasons, recompile_advice
from jaxprtool.recording.recorded_run import Function, Reason
from tests.recording.recorded import Calls
from tests.render.recorded import compilation


def step(params, batch, lr=0.1, mask=None, training=True, size=1, rule=None):
    return jax.tree.map(lambda x: x * 2, batch)


PARAMS = {"w": np.ones(3, np.float32), "b": np.ones((3, 2), np.float32)}
LAYERS = {
    f"layer{i}": {"kernel": np.ones((2, i + 1), np.float32), "bias": np.ones(1, np.float32)}
    for i in range(20)
}


def tokens(length, dtype=np.int32):
    return {"ids": np.ones((4, length), dtype), "mask": np.ones((4, length), np.float32)}


@pytest.fixture
def calls():
    return Calls()


def why(*keys) -> tuple[Reason, ...]:
    index, found = reasons(keys[-1], keys[:-1])
    assert index == len(keys) - 2
    return found


def only(*keys) -> Reason:
    [reason] = why(*keys)
    return reason


def parts_of(reason):
    return reason.kind, reason.path, reason.before, reason.after


def test_the_first_compilation_has_no_reasons(calls):
    assert reasons(calls.key(step, PARAMS, 1), ()) == (-1, ())


# --- shapes ---------------------------------------------------------------------------------------


def test_a_changed_length(calls):
    keys = [calls.key(step, PARAMS, np.ones((4, n), np.int32)) for n in (17, 13)]
    reason = only(*keys)
    assert parts_of(reason) == ("shape", "batch", "i32[4,17]", "i32[4,13]")
    assert reason.line == "train.py:20"
    assert reason.advice == (
        'jaxprtool.jit(step, types="batch=i32[4,n]", shapes={"n": 17}) pads and compiles once'
    )


def test_arrays_of_a_program_that_cannot_be_masked_are_padded_by_hand(calls):
    keys = [calls.key(step, PARAMS, np.ones((4, n), np.int32)) for n in (17, 13)]
    _, [reason] = reasons(keys[1], keys[:1], foreign=True)
    assert reason.advice == "pad batch to 17"


def test_the_length_of_all_arrays_of_an_argument_is_one_reason(calls):
    reason = only(*[calls.key(step, PARAMS, tokens(n)) for n in (17, 13)])
    assert parts_of(reason) == ("shape", "batch", "[4,17]", "[4,13] (2 arrays)")
    assert "batch={'ids': i32[4,n], 'mask': f32[4,n]}" in reason.advice


def test_the_leading_axis_of_all_arrays_of_an_argument_is_one_reason(calls):
    batch = [{"x": np.ones((n, 4)), "y": np.ones(n)} for n in (64, 13)]
    reason = only(*[calls.key(step, PARAMS, each) for each in batch])
    assert parts_of(reason) == ("shape", "batch", "[64,…]", "[13,…] (2 arrays)")
    batch = [{"x": np.ones((n, 4)), "y": np.ones((n, 5))} for n in (64, 13)]
    reason = only(*[calls.key(step, PARAMS, each) for each in batch])
    assert parts_of(reason) == ("shape", "batch", "[64,*]", "[13,*] (2 arrays)")


def test_sizes_at_several_axes_are_one_reason(calls):
    batch = [{"x": np.ones(n), "y": np.ones((3, n)), "z": np.ones((n, 7, n))} for n in (5, 6)]
    reason = only(*[calls.key(step, PARAMS, each) for each in batch])
    assert parts_of(reason)[1:] == ("batch", "size 5", "size 6 (3 arrays)")
    reason = only(*[calls.key(step, PARAMS, {**each, "w": np.ones(2)}) for each in batch])
    assert reason.path == "batch[*]"


def test_many_lengths_suggest_powers_of_two_as_buckets(calls):
    keys = [calls.key(step, PARAMS, np.ones((4, n), np.int32)) for n in (17, 13, 40, 5)]
    assert 'shapes={"n": (8, 16, 32, 64)}' in only(*keys).advice


def test_the_advice_works_as_code(calls):
    """The call in the advice compiles once for all recorded calls."""
    lengths = (17, 13, 16)
    keys = [calls.key(step, PARAMS, tokens(n)) for n in lengths]
    text = re.match(r"jaxprtool\.jit\(.*?\}\)", only(*keys).advice)[0]
    traced = []

    def step_of(params, batch, lr=0.1):
        traced.append(1)
        return step(params, batch)

    padded = eval(text, {"jaxprtool": jaxprtool, "step": step_of})
    for n in lengths:
        assert padded(PARAMS, tokens(n))["ids"].shape == (4, n)
    assert len(traced) == 2  # the buckets 16 and 32


def test_one_advice_covers_all_arguments_with_changing_sizes(calls):
    traced = []

    def loss(params, x, y):
        traced.append(1)
        return (x @ params - y[:, 0]).sum()

    def batch(n):
        return np.ones(2, np.float32), np.ones((n, 2), np.float32), np.ones((n, 1), np.float32)

    first, second = why(*[calls.key(loss, *batch(n)) for n in (32, 4)])
    assert (first.path, second.path, second.advice) == ("x", "y", "")
    text = re.match(r"jaxprtool\.jit\(.*?\}\)", first.advice)[0]
    traced.clear()
    padded = eval(text, {"jaxprtool": jaxprtool, "loss": loss})
    assert [padded(*batch(n)) for n in (32, 4)] == [32.0, 4.0]
    assert len(traced) == 1
    model = [np.ones((n, 2), np.float32) for n in (4, 5)]
    found = why(*[calls.key(step, each, each) for each in model])
    assert [each.advice for each in found] == ["", ""]


def test_no_advice_pads_a_model_or_mostly_padding(calls):
    wider = jax.tree.map(lambda x: np.ones([2 * n for n in x.shape], np.float32), PARAMS)
    for reason in why(calls.key(step, PARAMS, 1), calls.key(step, wider, 1)):
        assert reason.advice == ""
    assert only(*[calls.key(step, PARAMS, np.ones(n)) for n in (1, 5000)]).advice == ""
    assert only(*[calls.key(step, PARAMS, np.ones(n)) for n in (0, 5)]).advice == ""
    assert only(*[calls.key(step, PARAMS, np.ones([3] * n)) for n in (1, 2)]).advice == ""


def test_advice_for_a_lambda_names_only_the_size(calls):
    fun = lambda batch: batch  # noqa: E731
    reason = only(*[calls.key(fun, np.ones((4, n), np.int32)) for n in (17, 13)])
    assert reason.advice == "pad batch to 17"


def test_many_different_shapes_are_one_reason(calls):
    wider = jax.tree.map(lambda x: np.ones([2 * n for n in x.shape], np.float32), LAYERS)
    reason = only(calls.key(step, LAYERS, 1), calls.key(step, wider, 1))
    assert parts_of(reason) == ("shape", "params", "f32[1], …", "f32[2], … (40 differ)")


# --- types ----------------------------------------------------------------------------------------


def test_a_changed_weak_type(calls):
    reason = only(calls.key(step, PARAMS, 1, 0.1), calls.key(step, PARAMS, 1, np.float32(0.1)))
    assert parts_of(reason) == ("weak_type", "lr", "~f32[]", "f32[]")
    assert reason.advice == "pass jnp.asarray(lr, jnp.float32) in every call"
    assert not jnp.asarray(0.1, jnp.float32).aval.weak_type


def test_a_number_of_another_type(calls):
    reason = only(calls.key(step, PARAMS, 1, 1), calls.key(step, PARAMS, 1, 0.1))
    assert parts_of(reason) == ("dtype", "lr", "~i32[]", "~f32[]")
    assert reason.advice == "pass jnp.asarray(lr, jnp.float32) in every call"


def test_the_dtype_of_all_parameters_is_one_reason(calls):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), LAYERS)
    reason = only(calls.key(step, LAYERS, 1), calls.key(step, half, 1))
    assert parts_of(reason) == ("dtype", "params", "f32", "bf16 (40 arrays)")
    kernels = {k: {**v, "kernel": half[k]["kernel"]} for k, v in LAYERS.items()}
    reason = only(calls.key(step, LAYERS, 1), calls.key(step, kernels, 1))
    assert reason.path == "params['layer0..19']['kernel']"


def test_a_dtype_and_a_shape_are_two_reasons(calls):
    keys = calls.key(step, PARAMS, np.ones(4)), calls.key(step, PARAMS, np.ones(5, np.int32))
    assert [parts_of(each) for each in why(*keys)] == [
        ("shape", "batch", "[4]", "[5]"),
        ("dtype", "batch", "f32", "i32"),
    ]


def test_a_changed_sharding(calls):
    key = calls.key(step, PARAMS, 1)
    placed = [replace(each, sharding="P('x') of 8") for each in key.arguments]
    reason = only(key, replace(key, arguments=tuple(placed[:2]) + key.arguments[2:]))
    assert parts_of(reason) == ("sharding", "params", "not placed", "P('x') of 8 (2 arrays)")
    assert reason.advice == "jax.device_put before the first call places params once"
    moved = [replace(each, sharding="P('y') of 8") for each in placed[:2]]
    keys = (replace(key, arguments=(*leaves, *key.arguments[2:])) for leaves in (placed[:2], moved))
    assert only(*keys).advice.startswith("give params one sharding in every call")


# --- the structure --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "path", "was", "now"),
    [
        ({"x": 1}, {"x": 1, "y": np.ones(3)}, "batch['y']", "absent", "f32[3]"),
        ({"x": 1, "y": {"z": 1}}, {"x": 1}, "batch['y']", "dict(z)", "absent"),
        ([1, 2], (1, 2), "batch", "list(2)", "tuple(2)"),
        ([1, {"a": 2}], [1, (2,)], "batch[1]", "dict(a)", "tuple(1)"),
        ({"x": None}, {"x": np.ones(3)}, "batch['x']", "None", "f32[3]"),
        (1, {"x": {"y": 1}}, "batch", "~i32[]", "dict(x)"),
    ],
)
def test_another_tree_structure(calls, before, after, path, was, now):
    reason = only(calls.key(step, PARAMS, before), calls.key(step, PARAMS, after))
    assert parts_of(reason) == ("structure", path, was, now)


def test_an_additional_argument_or_one_passed_by_name(calls):
    keys = calls.key(step, PARAMS, 1), calls.key(step, PARAMS, 1, mask=np.ones(3))
    assert parts_of(only(*keys)) == ("structure", "mask", "None (default)", "f32[3]")
    keys = calls.key(step, PARAMS, 1, 0.1), calls.key(step, PARAMS, 1, lr=0.1)
    names = "(params, batch, lr)", "(params, batch, lr=)"
    assert parts_of(only(*keys)) == ("structure", "", *names)


def test_many_additional_entries_are_one_reason(calls):
    more = {**tokens(3), **{f"x{i}": np.ones(4) for i in range(30)}}
    reason = only(calls.key(step, PARAMS, tokens(3)), calls.key(step, PARAMS, more))
    assert parts_of(reason) == ("structure", "batch['x0..29']", "absent", "f32[4] (30 arrays)")


def test_a_new_optimizer_object(calls):
    """Optax's functions are static fields of the state, and compared by identity."""
    optax = pytest.importorskip("optax")
    TrainState = pytest.importorskip("flax.training.train_state").TrainState

    def state(rate):
        return TrainState.create(apply_fn=step, params=PARAMS, tx=optax.sgd(rate))

    reason = only(calls.key(step, state(0.1), 1), calls.key(step, state(0.1), 1))
    name = "GradientTransformationExtraArgs"
    assert parts_of(reason) == ("static", "params.tx", name, f"another {name}")
    assert reason.advice == "make params.tx once: JAX compares functions by identity"
    reason = only(calls.key(step, state(0.1), 1), calls.key(step, state(0.25), 1))
    assert "0.1" in reason.before and "0.25" in reason.after
    assert len(reason.before) < 110


# --- static arguments and settings ----------------------------------------------------------------


def test_a_changed_static_argument(calls):
    keys = [calls.key(step, PARAMS, 1, static={"training": each}) for each in (True, False)]
    reason = only(*keys)
    assert parts_of(reason) == ("static", "training", "True", "False")
    assert reason.advice == ""


def test_an_omitted_static_argument(calls):
    keys = calls.key(step, PARAMS, 1), calls.key(step, PARAMS, 1, static={"training": True})
    assert parts_of(only(*keys)) == ("static", "training", "True (default)", "True")


def test_a_static_number_with_many_values(calls):
    keys = [calls.key(step, PARAMS, 1, static={"size": each}) for each in range(4)]
    assert only(*keys[:2]).advice == ""
    assert only(*keys).advice == ("4 values: do not make size static, unless a shape depends on it")


def test_a_new_static_object(calls):
    class Config:
        pass

    keys = [calls.key(step, PARAMS, 1, static={"size": Config()}) for _ in range(2)]
    reason = only(*keys)
    assert parts_of(reason) == ("static", "size", "Config #1", "Config #2")
    assert reason.advice == "pass one Config, or define __eq__ and __hash__ if the two are equal"
    keys = [calls.key(step, PARAMS, 1, static={"rule": lambda x: x}) for _ in range(2)]
    assert only(*keys).advice == "make rule once: JAX compares functions by identity"


def test_a_changed_jax_config(calls):
    before = calls.key(step, PARAMS, np.float32(1))
    after = replace(before, context={"enable_x64": "True"})
    assert parts_of(only(before, after)) == ("context", "enable_x64", "False", "True")
    after = replace(before, context={**before.context, "mesh": "Mesh('x': 8)"})
    assert parts_of(only(before, after)) == ("context", "mesh", "not set", "Mesh('x': 8)")


def test_x64_gives_no_advice_on_types(calls):
    before = calls.key(step, PARAMS, 1)
    jax.config.update("jax_enable_x64", True)
    try:
        after = calls.key(step, PARAMS, 1)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert {(each.kind, each.advice) for each in why(before, after)} == {
        ("dtype", ""),
        ("context", ""),
    }


def test_an_option_of_jit(calls):
    before = calls.key(step, PARAMS, 1)
    donated = replace(before, options={"donate_argnums": "(0,)"})
    assert parts_of(only(before, donated)) == ("function", "donate_argnums", "not given", "(0,)")
    placed = replace(before, options={"out_shardings": "P('x')"})
    assert only(before, placed).kind == "sharding"


# --- the function ---------------------------------------------------------------------------------


def test_a_lambda_in_a_loop(calls):
    keys = [calls.key(lambda x: x, 1) for _ in range(4)]
    reason = only(*keys)
    assert parts_of(reason) == ("function", "", "the lambda", "another lambda object")
    assert reason.line == "train.py:9"
    assert reason.advice == "train.py:9 led to 4 calls of jax.jit: make one, outside of any loop"


def test_an_advice_names_its_line_once(calls):
    reason = only(*(calls.key(lambda x: x, 1) for _ in range(4)))
    compiled = compilation("f", 1.0, reasons=(reason,))
    function = Function("f", "train.py:1", "train.py:9", (compiled, compiled))
    (advice,) = recompile_advice([function])
    assert advice.startswith("f was compiled 2 times: train.py:9 led to 4 calls")


def test_a_loop_that_compiles_twice_is_detected_by_the_count_of_calls(calls):
    keys = [calls.key(lambda x: x, 1) for _ in range(2)]
    assert "9 calls" in only(keys[0], replace(keys[1], in_loop=8)).advice


def test_a_closure(calls):
    def scaled(rate):
        return lambda x: x * rate

    reason = only(calls.key(scaled(0.1), 1), calls.key(scaled(0.2), 1))
    assert parts_of(reason) == ("closure", "rate", "0.1", "0.2")
    assert reason.advice.startswith("make rate an argument, unless a shape depends on it; ")
    assert only(calls.key(scaled(0.1), 1), calls.key(scaled(0.1), 1)).kind == "function"
    array = only(calls.key(scaled(jnp.ones(2)), 1), calls.key(scaled(jnp.ones(3)), 1))
    assert parts_of(array) == ("closure", "rate", "f32[2]", "f32[3]")


def test_a_loop_at_the_top_level_of_a_script(calls):
    """Its variable is a global, and part of the program like a closure's."""
    names = {"jnp": jnp}
    code = "lambda x, *, deep=3: jnp.size(x) * size + x.ndim + ndim(x)"
    names["ndim"] = np.ndim
    keys = []
    for size in (1, 2):
        names["size"] = size
        names["shape"] = -size  # not read
        keys.append(calls.key(eval(code, names), np.ones(3)))
    assert parts_of(only(*keys)) == ("closure", "size", "1", "2")
    assert keys[0].function.closure == {"deep": "3", "size": "1"}


def test_a_partial_and_a_method(calls):
    class Trainer:
        def step(self, x):
            return x

    keys = [calls.key(functools.partial(step, PARAMS, lr=0.1 * i), 1) for i in (1, 2)]
    assert parts_of(only(*keys)) == ("closure", "lr", "0.1", "0.2")
    keys = [calls.key(functools.partial(step, PARAMS), 1) for _ in range(2)]
    assert parts_of(only(*keys))[2:] == ("the partial", "another partial object")
    keys = [calls.key(Trainer().step, 1) for _ in range(2)]
    assert parts_of(only(*keys)) == ("closure", "self", "Trainer #1", "Trainer #2")


def test_a_library_function_is_not_the_users_to_change(calls):
    def of_library(key):
        return replace(key, function=replace(key.function, library=True))

    several = [
        [calls.key(lambda x: x, 1) for _ in range(2)],
        [calls.key(step, PARAMS, 1, static={"rule": lambda x: x}) for _ in range(2)],
        [calls.key(step, PARAMS, 1, each) for each in (0.1, np.float32(0.1))],
    ]
    for keys in several:
        assert only(*keys).advice
        assert only(*map(of_library, keys)).advice == ""
    keys = [calls.key(step, PARAMS, np.ones((4, n), np.int32)) for n in (17, 13)]
    assert only(*map(of_library, keys)).advice == "pad batch to 17"


def test_methods_of_one_object_are_equal(calls):
    class Trainer:
        def step(self, x):
            return x

    trainer = Trainer()
    assert only(calls.key(trainer.step, 1), calls.key(trainer.step, 1)).kind == "cache"


def test_equal_keys_have_no_reason(calls):
    key = calls.key(step, PARAMS, 1)
    reason = only(key, key)
    assert parts_of(reason) == ("cache", "", "compiled", "JAX's cache no longer had it")
    reason = only(key, replace(key, cleared=1, cleared_line="train.py:33"))
    assert parts_of(reason) == ("cache", "", "compiled", "JAX's cache was cleared")
    assert reason.line == "train.py:33"


# --- --- the closest key --------------------------------------------------------------------------


def test_the_closest_key_has_the_fewest_differences(calls):
    keys = [
        calls.key(step, PARAMS, tokens(17), static={"training": True}),
        calls.key(step, PARAMS, tokens(13), static={"training": False}),
        calls.key(step, PARAMS, 1, static={"training": False}),
    ]
    key = calls.key(step, PARAMS, tokens(13), static={"training": True})
    index, [reason] = reasons(key, keys)
    assert index == 1 and reason.kind == "static"


def test_among_different_arguments_the_one_with_fewer_arrays_is_closer(calls):
    changed = {**tokens(17), "mask": np.ones((4, 2))}
    keys = [calls.key(step, PARAMS, each) for each in (tokens(17), {"x": 1}, tokens(17), {"y": 1})]
    assert nearest(calls.key(step, PARAMS, changed), keys) == 2  # the latest of two


@pytest.mark.proof
def test_a_thousand_earlier_compilations_are_compared_fast(calls):
    """A key of 500 leaves is compared with a thousand keys in well under a second."""
    layers = {f"l{i}": {"k": np.ones((2, 1)), "b": np.ones(1)} for i in range(250)}
    base = calls.key(step, layers, tokens(3))
    keys = [
        replace(
            base,
            arguments=tuple(
                replace(each, shape=(4, n)) if each.path.startswith("batch") else each
                for each in base.arguments
            ),
        )
        for n in range(1, 1002)
    ]
    reasons(keys[-1], keys[:-1])  # the hashes of each key are computed once
    start = time.process_time()
    assert reasons(keys[-1], keys[:-1])[0] == 999
    assert time.process_time() - start < 0.5


def test_a_key_is_the_same_after_json(calls):
    key = calls.key(step, PARAMS, tokens(3), static={"training": True})
    key = replace(key, line="a.py:1", cleared=3)
    text = json.dumps(key.to_json())
    read = CacheKey.from_json({**json.loads(text), "of_a_later_release": 1})
    assert read == key and read.parts == key.parts


def test_long_texts_are_truncated_where_they_differ():
    before, after = difference_texts("f(" + "x, " * 100 + "lr=0.1)", "f(" + "x, " * 100 + "lr=0.2)")
    assert before.endswith("lr=0.1)") and after.endswith("lr=0.2)")
    assert max(len(before), len(after)) < 100
    assert difference_texts("relu #1", "gelu #1") == ("relu", "gelu")
    assert difference_texts("A #1", "A #2") == ("A #1", "A #2")
