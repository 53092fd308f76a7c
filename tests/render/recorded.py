"""Recorded runs made by hand, for the tests of summaries and pages."""

from jaxprtool.recording.recorded_run import (
    Argument,
    Calls,
    Compilation,
    Function,
    OutsideJit,
    Process,
    Reason,
    Run,
    Transfer,
)

#: A name that must not become markup, a script, or a terminal's escape sequence.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b[31m\u202e"

COMMAND = ("python", "train.py", "--steps", "100")


def compilation(name, start=0.0, times=(0.1, 0.05, 1.0), **rest):
    given = {
        "cpu_seconds": 1.5 * sum(each or 0.0 for each in times),
        "cached": False,
        "equations": 120,
        "arguments": (Argument("params['w']", "f32", (3, 4)), Argument("batch", "i32", (4, 17))),
        "results": (Argument("[0]", "f32", ()),),
        "statics": {},
        "line": "train.py:31",
        "library": "",
        "file": f"process-0/{name}.jaxpr",
        **rest,
    }
    return Compilation(name, start, *times, **given)


SHAPE = Reason(
    "shape",
    "batch",
    "i32[4,17]",
    "i32[4,13]",
    "train.py:31",
    "pad batch, or: jaxprtool.jit(step, shapes={'batch': 'i32[4,n]'})",
)
WEAK = Reason("weak_type", "lr", "~f32[]", "f32[]", "train.py:31", "jnp.asarray(lr, 'float32')")
ANEW = Reason(
    "function", "", "the lambda", "another lambda object", "train.py:40",
    "call jax.jit once, before the loop",
)  # fmt: skip

PROCESS = Process(0, 4711, COMMAND, 0.0, 41.2, "0.12.0", "cpu")


def step():
    return Function(
        "step",
        "train.py:12",
        "train.py:11",
        (
            compilation("step", 2.0, (0.8, 0.5, 8.0)),
            compilation("step@2", 14.0, (0.6, 0.4, 7.2), reasons=(SHAPE,), nearest="step"),
            compilation("step@3", 26.0, (0.6, 0.4, 5.0), reasons=(SHAPE, WEAK), nearest="step@2"),
        ),
    )


def training(**changes):
    """A script of three functions, one of which is compiled three times."""
    anew = tuple(
        compilation(f"<lambda>@{i + 1}", 35 + i / 10, (0.01, 0.01, 0.06), reasons=(ANEW,) * (i > 0))
        for i in range(8)
    )
    given = {
        "seconds": 41.2,
        "exit_code": 0,
        "functions": (
            step(),
            Function("init", "model.py:9", "train.py:20", (compilation("init", 0.5, cached=True),)),
            Function("<lambda>", "train.py:40", "train.py:40", anew),
        ),
        "outside_jit": (
            OutsideJit("train.py:24", 38, 2.0, {"add": 20, "broadcast_in_dim": 18}, 0.3),
            OutsideJit("data.py:8", 23, 1.1, {"convert_element_type": 23}, 0.4),
        ),
        "transfers": (
            Transfer("to_host", "train.py:44", 100, 400, 2.1),
            Transfer("to_device", "train.py:31", 3, 3 << 20, path="step: batch"),
        ),
        "processes": (PROCESS,),
        **changes,
    }
    return Run("run", COMMAND, **given)


def large(functions=500):
    """A run with many programs of many arguments, and long names."""
    arguments = tuple(
        Argument(f"params['encoder']['layers_{i}']['attention']['kernel']", "bf16", (768, 12, 64))
        for i in range(40)
    )
    return training(
        functions=tuple(
            Function(
                f"forward_of_a_module_with_a_long_name_{i}",
                f"package/modules/transformer/attention_layers.py:{i}",
                "",
                (compilation(f"f{i}", i / 20, (0.01, 0.01, 1.0 / (i + 1)), arguments=arguments),),
                Calls(1000 + i, 1000 + i, 12.5, 0.3),
            )
            for i in range(functions)
        ),
        calls_counted=True,
    )


def hostile():
    reason = Reason("static", HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    given = {"statics": {HOSTILE: HOSTILE}, "library": HOSTILE, "error": HOSTILE, "line": HOSTILE}
    twice = (
        compilation(HOSTILE, arguments=(Argument(HOSTILE, HOSTILE, ("<b>",)),), **given),
        compilation(HOSTILE + "2", reasons=(reason,), nearest=HOSTILE, **given),
    )
    return Run(
        HOSTILE,
        (HOSTILE, "a\nb"),
        1.0,
        None,
        (Function(HOSTILE, HOSTILE, HOSTILE, twice, Calls(1, 1, 1.0, 1.0), 2),),
        (OutsideJit(HOSTILE, 1, 0.1, {HOSTILE: 1}),),
        (Transfer("to_host", HOSTILE, 1, 1), Transfer("to_device", HOSTILE, 1, 1, path=HOSTILE)),
        (Process(0, 1, (HOSTILE,), 0.0, 1.0, HOSTILE, HOSTILE, HOSTILE),),
        (HOSTILE,),
    )
