"""Pipelines are parsed from text, run in order, and checked after every pass."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool import passes as pipeline_module
from jaxprtool.errors import CheckError, PipelineError
from jaxprtool.passes import (
    Observer,
    OptimizationLevel,
    Pass,
    Pipeline,
    levels,
    pass_options,
    pass_summary,
)


@dataclass(frozen=True)
class Split(Pass):
    """Return the program twice, under two names."""

    name: ClassVar[str] = "split"
    names: tuple[str, ...] = ("left", "right")

    def __call__(self, program):
        return jaxprtool.Programs({name: program.replace(name=name) for name in self.names})


@dataclass(frozen=True)
class Scale(Pass):
    """Rename the program; the options are there to be checked."""

    name: ClassVar[str] = "scale"
    factor: float
    mode: Literal["up", "down"] = "up"
    axes: tuple[int, ...] | int | None = None
    extra: Any = None

    def __call__(self, program):
        return program.replace(name=f"{program.name}*{self.factor}")


@dataclass(frozen=True)
class Broken(Pass):
    """Drop the name of an argument."""

    name: ClassVar[str] = "broken"

    def __call__(self, program):
        return program.replace(arg_names=())


@pytest.fixture(autouse=True)
def passes(monkeypatch):
    monkeypatch.setattr(pipeline_module, "_registered", {})
    for cls in (Split, Scale, Broken):
        jaxprtool.register(cls)


@pytest.fixture
def program():
    return jaxprtool.trace(lambda a: (jnp.cos(a), jnp.sin(a))[1], np.ones(3, np.float32))


def test_passes_run_in_order(program):
    result = Pipeline.parse("scale(2), dce, scale(factor=3)")(program)
    assert result.name == f"{program.name}*2*3"
    assert len(result.jaxpr.eqns) == 1


def test_an_empty_pipeline_changes_nothing(program):
    assert Pipeline.parse("")(program) is program


def test_later_passes_run_on_each_program_or_on_one(program):
    result = Pipeline.parse("split, dce, right.scale(2)")(program)
    assert list(result) == ["left", "right"]
    assert [len(p.jaxpr.eqns) for p in result.values()] == [1, 1]
    assert [p.name for p in result.values()] == ["left", "right*2"]


def test_programs_made_from_a_named_program_have_dotted_names(program):
    result = Pipeline.parse("split, left.split, left.right.dce")(program)
    assert list(result) == ["left.left", "left.right", "right"]
    assert [len(p.jaxpr.eqns) for p in result.values()] == [2, 1, 2]


def test_apply_accepts_text_or_a_pass(program):
    assert len(program.apply("dce").jaxpr.eqns) == 1
    assert program.apply(Scale(2.0)).name.endswith("*2.0")


def test_the_text_of_a_pipeline_can_be_parsed_again(program):
    text = "split, left.scale(factor=2, axes=(0, 1)), dce(drop_inputs=True)"
    assert str(Pipeline.parse(text)) == text


def test_a_pass_that_breaks_the_program_is_named(program):
    with pytest.raises(
        CheckError, match=r"pass 'broken' produced an invalid program: .*arguments differ"
    ):
        Pipeline.parse("dce, broken")(program)
    assert Pipeline.parse("dce, broken").run(program, check=False).arg_names == ()


def test_an_observer_sees_every_pass_on_every_program(program):
    seen = []

    class Watch(Observer):
        def before(self, step, program):
            seen.append(("before", str(step), program.name))

        def after(self, step, program, result, seconds):
            seen.append(("after", str(step), seconds >= 0))

    Pipeline.parse("split, right.dce").run(program, Watch())
    assert seen == [
        ("before", "split", program.name),
        ("after", "split", True),
        ("before", "right.dce", "right"),
        ("after", "right.dce", True),
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("dec", "unknown pass 'dec'", "did you mean 'dce'?"),
        ("zzzz", "unknown pass 'zzzz'", "`jaxprtool explain` lists the passes"),
        ("dce(dropinputs=True)", "pass 'dce' has no option 'dropinputs'", "'drop_inputs'"),
        ("dce(drop_inputs=1)", "option 'drop_inputs' of pass 'dce' must be bool, not 1", None),
        ("dce(True, drop_inputs=True)", "got option 'drop_inputs' twice", None),
        ("dce(1, 2)", "takes at most 1 options, not 2", "drop_inputs"),
        ("scale", "pass 'scale' needs option 'factor' (float)", None),
        ("scale(True)", "option 'factor' of pass 'scale' must be float, not True", None),
        ("scale(1, mode='side')", "option 'mode' of pass 'scale'", None),
        ("scale(1, axes=(1, 'a'))", "option 'axes' of pass 'scale'", None),
        ("left.dce", "no program 'left' for 'left.dce': there is only one program", None),
        ("split, rihgt.dce", "available: left, right", "did you mean 'right'?"),
        ("dce(", "not closed", None),
        ("'dce'", "is not a pass", "NAME or NAME(option=value)"),
        ("-O7", "'-O7' is not a pipeline", "available: -O0, -O1, -O2, -O3"),
        ("-dce", "'-dce' is not a pipeline", "available: -O0, -O1, -O2, -O3"),
        ("-1", "'-1' is not a pipeline", "available: -O0, -O1, -O2, -O3"),
        ("dce()()", "is not a pass", None),
        ("drop_inputs=True", "option 'drop_inputs' has no pass", None),
        ("dce(**{})", "unpacking", None),
        ("dce(drop_inputs=__import__('os'))", "a call is not allowed in the pipeline", None),
    ],
)
def test_mistakes_are_reported(program, text, message, hint):
    with pytest.raises(PipelineError) as caught:
        Pipeline.parse(text)(program)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_options_come_from_the_fields_and_help_from_the_docstring():
    assert [(o.name, o.type_name, o.required) for o in pass_options(Scale)] == [
        ("factor", "float", True),
        ("mode", "Literal['up', 'down']", False),
        ("axes", "tuple[int, ...] | int | None", False),
        ("extra", "Any", False),
    ]
    assert pass_summary(Scale) == "Rename the program; the options are there to be checked."


# --- named pipelines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shorten(Pass):
    """Remove the last equation, if there is more than one."""

    name: ClassVar[str] = "shorten"

    def __call__(self, program):
        *eqns, _ = program.jaxpr.eqns
        if not eqns:
            return program
        jaxpr = jaxcompat.replace_jaxpr(
            program.jaxpr,
            constvars=program.jaxpr.constvars,
            consts=program.jaxpr.consts,
            invars=program.jaxpr.invars,
            outvars=eqns[-1].outvars,
            eqns=eqns,
            debug_info=program.jaxpr.debug_info,
        )
        return program.replace(jaxpr=jaxpr)


class Seen(Observer):
    def __init__(self):
        self.passes = []

    def after(self, step, program, result, seconds):
        self.passes.append(str(step))


@pytest.fixture
def shorten(monkeypatch):
    jaxprtool.register(Shorten)
    monkeypatch.setitem(levels, "O9", OptimizationLevel("shorten, dce", last="scale(2.0)"))
    return jaxprtool.trace(lambda x: jnp.sin(jnp.cos(jnp.tan(jnp.exp(x)))), jnp.ones(3))


def test_a_named_pipeline_is_repeated_until_nothing_changes(shorten):
    seen = Seen()
    after = Pipeline.parse("-O9").run(shorten, seen)
    assert [e.primitive.name for e in after.jaxpr.eqns] == ["exp"]
    # The fourth repetition of `shorten` changes nothing, and `dce` has seen its last result.
    assert seen.passes == ["shorten", "dce"] * 3 + ["shorten", "scale(factor=2.0)"]


def test_a_named_pipeline_stops_at_the_bound(shorten, monkeypatch):
    monkeypatch.setattr(pipeline_module, "MAX_ITERATIONS", 2)
    after = Pipeline.parse("-O9")(shorten)
    assert [e.primitive.name for e in after.jaxpr.eqns] == ["exp", "tan"]


def test_an_unchanged_program_is_the_same_object(program):
    assert Pipeline.parse("-O0")(program) is program
    clean = Pipeline.parse("dce")(program)
    assert Pipeline.parse("dce, -O0")(clean) is clean


def test_named_pipelines_can_be_combined_with_passes_and_apply_to_one_program(shorten):
    pipeline = Pipeline.parse("split, left.O9, -O0")
    assert str(pipeline) == "split, left.O9, -O0"
    assert [each.name for each in pipeline.passes()] == ["split", "shorten", "dce", "scale"]
    programs = pipeline(shorten)
    assert [len(p.jaxpr.eqns) for p in programs.values()] == [1, 4]


def test_each_level_consists_of_existing_passes():
    for name in levels:
        assert str(Pipeline.parse(f"-{name}")) == f"-{name}"


def test_the_third_level_is_the_second_followed_by_outline():
    def repeated(x):
        for _ in range(12):
            x = (x - x.mean()) / jnp.sqrt(jnp.square(x).mean() + 1)
            x = jnp.log1p(jnp.exp(jnp.cumsum(x))) * jnp.tanh(x)
        return x

    program = jaxprtool.trace(repeated, jnp.ones(3))
    after = Pipeline.parse("-O3")(program)
    assert jaxprtool.equivalent(after, program.apply("-O2, outline"))
    assert any(jaxcompat.mark_of(eqn) == "unit" for eqn in after.jaxpr.eqns)
    assert not any(eqn.primitive.name == "jit" for eqn in program.apply("-O2").jaxpr.eqns)
