"""The JSON documents that commands print with `--json`, as types.

Documents may gain keys; the keys they have keep their names, types and meaning. Numbers that JSON
does not have are the strings "NaN", "Infinity" and "-Infinity"; a complex number is
`[real, imaginary]`. The page `docs/json.md` is made from this module.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

# --- programs ---------------------------------------------------------------------------------


class Source(TypedDict):
    """A place in a source file.

    Attributes:
        file: The path.
        line: The line, from 1.
    """

    file: str
    line: int


class Binder(TypedDict):
    """A variable where it is bound.

    Attributes:
        variable: Its name in the listing, unique in the program but for `_`.
        type: Its type, as a jaxpr prints it; left out with `--no-types`.
    """

    variable: str
    type: NotRequired[str]


class Operand(TypedDict):
    """A variable, or a literal, where it is used.

    Attributes:
        variable: The name of the variable.
        literal: Instead of `variable`: the literal's value, as a jaxpr prints it.
        type: The type of the literal.
    """

    variable: NotRequired[str]
    literal: NotRequired[str]
    type: NotRequired[str]


class Value(TypedDict):
    """A value that is counted.

    Attributes:
        name: Its readable path, such as `params['w']`.
        type: Its type, as a jaxpr prints it.
        bytes: Its size; null where it is unknown.
    """

    name: str
    type: str
    bytes: int | None


class BoundValue(TypedDict):
    """An argument, a constant or an output of a program.

    Attributes:
        name: Its readable path, such as `params['w']`.
        type: Its type, as a jaxpr prints it.
        bytes: Its size; null where it is unknown.
        variable: The name of the variable.
        literal: Instead of `variable`, of an output: the literal that is returned.
    """

    name: str
    type: str
    bytes: int | None
    variable: NotRequired[str]
    literal: NotRequired[str]


class Held(TypedDict):
    """A jaxpr among the parameters of an equation: one of `shared`, `jaxpr` and `folded`.

    Attributes:
        parameter: Where it is: `jaxpr`, `branches[0]`.
        shared: The name of a Body in the program's `shared`.
        jaxpr: The jaxpr itself.
        folded: How many equations it has, if it is deeper than `--depth`.
    """

    parameter: str
    shared: NotRequired[str]
    jaxpr: NotRequired[Body]
    folded: NotRequired[int]


class Equation(TypedDict):
    """An equation.

    Attributes:
        primitive: The name of its primitive.
        inputs: Its operands.
        outputs: The variables that it binds.
        parameters: Its parameters by name, as text; the jaxprs among them are in `bodies`.
        bodies: The jaxprs that it holds.
        effects: Its effects, as text, if it has any.
        source: The line of the user's code that it comes from, if that is known.
        scope: Its name stack, if it has one.
    """

    primitive: str
    inputs: list[Operand]
    outputs: list[Binder]
    parameters: dict[str, str]
    bodies: list[Held]
    effects: NotRequired[list[str]]
    source: NotRequired[Source]
    scope: NotRequired[str]


class Skipped(TypedDict):
    """Equations that `--only` or `--depth` leave out.

    Attributes:
        skipped: How many.
    """

    skipped: int


class Body(TypedDict):
    """A jaxpr in a program.

    Attributes:
        constants: The variables of its constants.
        arguments: Its arguments.
        equations: Its equations, in order.
        outputs: What it returns.
    """

    constants: list[Binder]
    arguments: list[Binder]
    equations: list[Equation | Skipped]
    outputs: list[Operand]


class Program(TypedDict):
    """A program.

    Attributes:
        format: What this is.
        version: The version of the format.
        name: The name of the function.
        arguments: Its arguments, in order.
        constants: Its constants.
        outputs: What it returns.
        effects: Its effects, as text.
        equations: Its equations, in order.
        shared: The jaxprs that several equations have in common, by name.
    """

    format: Literal["jaxprtool.program"]
    version: Literal[1]
    name: str
    arguments: list[BoundValue]
    constants: list[BoundValue]
    outputs: list[BoundValue]
    effects: list[str]
    equations: list[Equation | Skipped]
    shared: dict[str, Body]


class PrimitiveCount(TypedDict):
    """How often a primitive occurs.

    Attributes:
        name: The primitive.
        total: How many equations it has in all.
        by_depth: How many at each depth; the program's own is 0.
    """

    name: str
    total: int
    by_depth: list[int]


class Stats(TypedDict):
    """The size of a program.

    Attributes:
        format: What this is.
        version: The version of the format.
        name: The name of the function.
        equations: How many equations there are in all.
        by_depth: How many at each depth; the program's own is 0.
        primitives: How often each primitive occurs, the most frequent first.
        constants: The constants of the program and of its bodies.
        arguments: The arguments.
        outputs: The outputs.
    """

    format: Literal["jaxprtool.stats"]
    version: Literal[1]
    name: str
    equations: int
    by_depth: list[int]
    primitives: list[PrimitiveCount]
    constants: list[Value]
    arguments: list[Value]
    outputs: list[Value]


# --- show, opt --------------------------------------------------------------------------------


class ShowDocument(TypedDict):
    """`show`.

    Attributes:
        programs: What is shown; several if a pass has given several.
    """

    programs: list[Program]


class StatsDocument(TypedDict):
    """`show --stats`.

    Attributes:
        stats: The size of each program.
    """

    stats: list[Stats]


# Not a class body: "pass" is a keyword of Python.
PassRun = TypedDict(
    "PassRun",
    {
        "pass": str,
        "program": str,
        "seconds": float,
        "equations_before": int,
        "equations_after": int,
    },
)
PassRun.__doc__ = """What a pass did to a program.

    Attributes:
        pass: The pass, with its options.
        program: The name of the program.
        seconds: How long it took.
        equations_before: How many equations it was given.
        equations_after: How many it left.
    """


class OptDocument(TypedDict):
    """`opt`.

    Attributes:
        programs: The programs after the passes.
        passes: What each pass did, in the order in which they ran.
    """

    programs: list[Program]
    passes: list[PassRun]


# --- run --------------------------------------------------------------------------------------


class Times(TypedDict):
    """How long each step of a run took, in seconds.

    Attributes:
        trace: Tracing.
        lower: Lowering; null under `jax_disable_jit`.
        compile: Compiling; null under `jax_disable_jit`.
        first_call: The first call.
        repeat: The median of the calls after it; null if there were none.
        repeats: How many these were.
    """

    trace: float
    lower: float | None
    compile: float | None
    first_call: float
    repeat: float | None
    repeats: int


class Output(TypedDict):
    """A result of a run: its value if it is small, or else statistics.

    Attributes:
        name: Its readable path.
        type: Its type, as a jaxpr prints it.
        value: The numbers, as nested lists.
        statistics: By name: `min`, `max`, `mean`, `nan`, `inf`, or `true` and `false`.
    """

    name: str
    type: str
    value: NotRequired[Any]
    statistics: NotRequired[dict[str, Any]]


class RunDocument(TypedDict):
    """`run`.

    Attributes:
        name: The name of the program.
        devices: Where it ran: `cpu:0`.
        random: The arguments that were filled with random values.
        times: How long each step took.
        outputs: The results, in order.
    """

    name: str
    devices: list[str]
    random: list[str]
    times: Times
    outputs: list[Output]


# --- unzip, vmap ------------------------------------------------------------------------------


class Variable(TypedDict):
    """A variable that init makes and apply takes.

    Attributes:
        name: Its path: `first/w`.
        type: Its type, as a jaxpr prints it.
        shape: Its dimensions; a symbolic one is a text.
        dtype: Its dtype, as NumPy calls it.
        bytes: Its size; null where it is unknown.
        source: The line that declares it; null where it is unknown.
    """

    name: str
    type: str
    shape: list[int | str]
    dtype: str
    bytes: int | None
    source: Source | None


class UnzipDocument(TypedDict):
    """`unzip`.

    Attributes:
        variables: The variables, in the order in which they are declared.
        programs: init and apply, after the passes.
        runs: With `--run`: the run of init and that of apply.
    """

    variables: list[Variable]
    programs: list[Program]
    runs: NotRequired[list[RunDocument]]


class MappedArgument(TypedDict):
    """An argument of a program that is mapped.

    Attributes:
        name: Its readable path.
        axis: The axis along which it is mapped; null if all lanes share it.
    """

    name: str
    axis: int | None


class VmapDocument(TypedDict):
    """`vmap`.

    Attributes:
        axis_size: How many lanes there are.
        axis_name: What collectives call the axis, or null.
        chunk: How many lanes are computed at a time; null if all are.
        arguments: Where each argument is mapped.
        equations_before: How many equations the program of one lane has.
        equations_after: How many the mapped one has.
        programs: The mapped program, or what the passes made of it.
    """

    axis_size: int
    axis_name: str | None
    chunk: int | None
    arguments: list[MappedArgument]
    equations_before: int
    equations_after: int
    programs: list[Program]


# --- passes, explain, backends ----------------------------------------------------------------


class PassSummary(TypedDict):
    """A pass in the list.

    Attributes:
        name: Its name in a pipeline.
        help: What it does, in a line.
        origin: The package, module or file that it comes from.
    """

    name: str
    help: str
    origin: str


class PassesDocument(TypedDict):
    """`passes`.

    Attributes:
        passes: The passes, by name.
        pipelines: The named pipelines: the passes of each, as text.
    """

    passes: list[PassSummary]
    pipelines: dict[str, str]


class Option(TypedDict):
    """An option of a pass.

    Attributes:
        name: Its name.
        type: Its type, as the source spells it.
        default: Its default, as text; null if it must be given.
    """

    name: str
    type: str
    default: str | None


class Rule(TypedDict):
    """A rule of a pass.

    Attributes:
        pattern: The equations that it is about.
        replacement: What they become.
        condition: When it holds.
        exact: `exact` if it changes no bit of a result; else when it runs.
    """

    pattern: str
    replacement: str
    condition: str
    exact: str


class PassDocument(TypedDict):
    """`explain` of a pass.

    Attributes:
        name: The name of the pass.
        text: All that it says of itself.
        origin: The package, module or file that it comes from.
        options: Its options.
        rules: Its rules, of a pass that works by rules.
    """

    name: str
    text: str
    origin: str
    options: list[Option]
    rules: NotRequired[list[Rule]]


class Trait(TypedDict):
    """What a primitive is like, where it is not as most are.

    Attributes:
        name: The trait.
        value: Its value, as Python spells it.
        text: What the trait says.
    """

    name: str
    value: str
    text: str


class PrimitiveDocument(TypedDict):
    """`explain` of a primitive.

    Attributes:
        name: The name of the primitive.
        text: What this is.
        traits: What it is like.
        tables: The tables that have a rule for it: `batch`, `dce`, `python`, `unzip`, ….
        rules: The rules of `simplify` that are about it.
    """

    name: str
    text: str
    traits: list[Trait]
    tables: list[str]
    rules: list[Rule]


class PipelineStep(TypedDict):
    """A pass of a named pipeline.

    Attributes:
        name: The pass, with its options.
        when: `repeated`, or `once, at the end`.
        help: What it does, in a line.
    """

    name: str
    when: str
    help: str


class PipelineDocument(TypedDict):
    """`explain` of a named pipeline.

    Attributes:
        name: The name of the pipeline.
        text: What the named pipelines are.
        passes: Its passes, in order.
    """

    name: str
    text: str
    passes: list[PipelineStep]


class Device(TypedDict):
    """A device.

    Attributes:
        id: Its number.
        kind: What it is.
    """

    id: int
    kind: str


class Backend(TypedDict):
    """A backend.

    Attributes:
        platform: Its name.
        version: Its version.
        default: Whether it is JAX's default.
        devices: Its devices.
    """

    platform: str
    version: str
    default: bool
    devices: list[Device]


class BackendsDocument(TypedDict):
    """`backends`.

    Attributes:
        backends: The backends of this machine.
    """

    backends: list[Backend]


#: The documents of each command.
DOCUMENTS: dict[str, tuple[Any, ...]] = {
    "show": (ShowDocument, StatsDocument),
    "opt": (OptDocument,),
    "run": (RunDocument,),
    "unzip": (UnzipDocument,),
    "vmap": (VmapDocument,),
    "passes": (PassesDocument,),
    "explain": (PassDocument, PipelineDocument, PrimitiveDocument),
    "backends": (BackendsDocument,),
}
