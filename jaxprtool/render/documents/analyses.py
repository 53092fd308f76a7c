"""Documents of what analyses find in a program: cost, memory, residuals, slices, repetition."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

# --- cost -------------------------------------------------------------------------------------


class Work(TypedDict):
    """What some equations do. Where sizes are symbolic, a number is a text: `2*n**2*d`."""

    flops: Annotated[int | str, "Arithmetic operations; a multiply-add is two."]
    transcendentals: Annotated[int | str, "Exponentials, logarithms, square roots and the like."]
    bytes_read: Annotated[int | str, "Bytes read from memory."]
    bytes_written: Annotated[int | str, "Bytes written to memory."]
    random_numbers: Annotated[int | str, "Numbers that are drawn, or words of random bits."]
    bytes_communicated: Annotated[int | str, "Bytes that a device gives to collectives."]


class GroupCost(Work):
    """What a group of equations does, at most."""

    name: Annotated[str, "What they have in common: `model.py:9`; empty if that is nothing."]
    per_round: Annotated[bool, "Whether loops of unknown rounds are among them, counted once."]
    least: NotRequired[Annotated[Work, "What they do at least, if branches decide."]]
    library: NotRequired[
        Annotated[
            str,
            "The one place in a library that the line calls; with `--frames all` every one on the "
            "way, by which groups are told apart.",
        ]
    ]
    seconds: NotRequired[Annotated[float, "How long it takes at least, with `--device`."]]
    limit: NotRequired[Annotated[str, "What limits it there: `compute` or `memory`."]]


class ProgramCost(TypedDict):
    """What a program costs."""

    name: Annotated[str, "The name of the program."]
    by: Annotated[str, "What the groups are by."]
    total: Annotated[GroupCost, "All of it; of a `shard_map`, on all devices."]
    per_device: Annotated[GroupCost | None, "What one device does, if there is a `shard_map`."]
    groups: Annotated[list[GroupCost], "The groups, the dearest first; scopes hold others."]
    collectives: Annotated[list[GroupCost], "The collectives, by kind and mesh axes."]
    unknown: Annotated[dict[str, int], "Primitives of unknown cost, with their equations."]
    left_to_partitioner: Annotated[
        list[str],
        "Arguments, results and equations with a sharding over several devices: arrays are whole.",
    ]
    seconds: Annotated[float | None, "How long it takes, by `--seconds` or `--measure`."]
    utilisation: Annotated[float | None, "The part of the device's FLOPs that products have then."]


class CostDocument(TypedDict):
    """`cost`, of one program."""

    total: Annotated[GroupCost, "All of the first program."]
    groups: Annotated[list[GroupCost], "The groups of the first program."]
    programs: Annotated[list[ProgramCost], "Each program."]


# --- memory -----------------------------------------------------------------------------------


class MemoryPoint(TypedDict):
    """The memory that a program needs when one of its equations runs."""

    position: Annotated[int, "The number of the equation, as they run; 0 before the first."]
    bytes: Annotated[int, "The bytes that are needed."]
    primitive: Annotated[str, "Its primitive."]
    source: Annotated[str, "The user's line that it comes from; empty if that is not known."]


class LiveValues(TypedDict):
    """Values that are alive together, equal in type, in line and in what they are."""

    kind: Annotated[
        str,
        "`argument`, `constant`, `result`, `room` for a result that is made later, `value` that an "
        "equation makes, `row` of what a loop goes over, what is `broadcast` for a reduction.",
    ]
    count: Annotated[int, "How many they are."]
    type: Annotated[str, "Their type."]
    bytes: Annotated[int, "The bytes of all of them."]
    name: Annotated[str, "The path of an argument or result, with `*` for numbers that differ."]
    primitive: Annotated[str, "What makes them; empty of arguments and constants."]
    source: Annotated[str, "The user's line that makes them; empty if that is not known."]
    reader: Annotated[str, "The primitive that reads them last; empty if they live to the end."]
    reader_source: Annotated[str, "The line that it comes from."]


class ProgramMemory(TypedDict):
    """The memory that a program needs."""

    name: Annotated[str, "The name of the program."]
    peak_bytes: Annotated[
        int, "The bytes that it needs: the sum of the four that follow, less `donated_bytes`."
    ]
    argument_bytes: Annotated[int, "Those of arguments."]
    result_bytes: Annotated[int, "Those of results, which have room from the start."]
    constant_bytes: Annotated[int, "Those of constants."]
    temporary_bytes: Annotated[int, "Those of all else, where that is most."]
    donated_bytes: Annotated[int, "Those of results that are written where an argument was."]
    left_to_partitioner: Annotated[
        list[str],
        "Arguments, results and equations with a sharding over several devices: arrays are whole.",
    ]
    at: Annotated[MemoryPoint, "Where it needs most."]
    live: Annotated[list[LiveValues], "What is alive there, the largest first."]
    curve: Annotated[list[MemoryPoint], "From the first equation to the last: 1001 points at most."]


class MemoryDocument(TypedDict):
    """`memory`, of one program."""

    peak_bytes: Annotated[int, "The bytes that the first program needs."]
    at: Annotated[MemoryPoint, "Where it needs most."]
    live: Annotated[list[LiveValues], "What is alive there, the largest first."]
    programs: Annotated[list[ProgramMemory], "Each program."]


# --- source -----------------------------------------------------------------------------------


class SourceLineCost(TypedDict):
    """What a line of a file costs."""

    line: Annotated[int, "The line, from 1."]
    equations: Annotated[int, "How many equations come from it, where they run."]
    total: Annotated[GroupCost, "What they cost."]
    forward: NotRequired[Annotated[GroupCost, "Of a gradient: the part that goes forward."]]
    backward: NotRequired[Annotated[GroupCost, "Of a gradient: the part that goes back."]]
    residual_bytes: NotRequired[
        Annotated[int, "The bytes of the residuals that it computes, if residuals are counted."]
    ]


class SourceFileCost(TypedDict):
    """What the lines of a file cost."""

    file: Annotated[str, "The path, from the folder of the user's files on."]
    lines: Annotated[list[SourceLineCost], "The lines that equations come from, in order."]


class ProgramSource(TypedDict):
    """What the lines that a program comes from cost."""

    name: Annotated[str, "The name of the program."]
    total: Annotated[GroupCost, "All of it."]
    files: Annotated[list[SourceFileCost], "The user's files."]
    elsewhere: Annotated[int, "How many equations come from no line of these."]
    residual_bytes: Annotated[int | None, "The bytes of all residuals; null if not counted."]
    unknown: Annotated[dict[str, int], "Primitives of unknown cost, with their equations."]


class SourceDocument(TypedDict):
    """`source`."""

    programs: Annotated[list[ProgramSource], "Each program."]


# --- residuals --------------------------------------------------------------------------------


class Reader(TypedDict):
    """An equation of the backward pass."""

    primitive: Annotated[str, "Its primitive."]
    source: Annotated[str, "The user's line that it comes from; empty if that is not known."]


class Residual(TypedDict):
    """A value that the backward pass needs of the forward pass."""

    type: Annotated[str, "Its type."]
    bytes: Annotated[int | None, "Its size; null where it is unknown."]
    source: Annotated[str, "The user's line that computes it, with the library's behind."]
    name: Annotated[str, "What `checkpoint_name` calls it, or empty."]
    argument: Annotated[str, "The argument that it is, or empty."]
    primitive: Annotated[str, "The primitive that computes it; empty of an argument."]
    readers: Annotated[list[Reader], "What reads it in the backward pass, products first."]
    recompute: Annotated[int | str, "The operations that compute it again from what else is kept."]
    policies: Annotated[list[str], "The policies of `jax.checkpoint` that would drop it."]


class SavedValue(TypedDict):
    """A value that a proposal saves."""

    name: Annotated[str, "What `checkpoint_name` calls it."]
    source: Annotated[str, "The user's line that computes it."]
    code: Annotated[str, "The expression to name; empty if it has the name already."]
    bytes: Annotated[int, "What saving it keeps, in all rounds of loops."]


class Proposal(TypedDict):
    """What to save so that a gradient keeps a budget."""

    budget: Annotated[int, "The bytes that may be kept."]
    policy: Annotated[str, "The policy of `jax.checkpoint`; empty if all fits without one."]
    values: Annotated[list[SavedValue], "What is saved, the largest first."]
    total_bytes: Annotated[int, "The bytes that are kept with it, measured."]
    flops: Annotated[int, "The FLOPs of the gradient with it."]
    flops_before: Annotated[int, "The FLOPs of the gradient without."]


class ResidualsDocument(TypedDict):
    """`residuals`."""

    name: Annotated[str, "The name of the program."]
    total_bytes: Annotated[int | None, "The bytes of all residuals; null where unknown."]
    residuals: Annotated[list[Residual], "The residuals, the largest first."]
    policies: Annotated[dict[str, int | None], "The bytes that are kept under each policy."]
    proposal: Annotated[Proposal | None, "What to save within `--budget`; null without one."]


# --- why --------------------------------------------------------------------------------------


class SlicedLine(TypedDict):
    """A line that equations of a slice come from."""

    source: Annotated[str, "The line: `model.py:9`; empty if it is not known."]
    equations: Annotated[int, "How many of its equations are of the slice."]
    of: Annotated[int, "How many it has."]
    primitives: Annotated[dict[str, int], "Those of the slice by primitive."]
    library: NotRequired[
        Annotated[str, "With `--frames all`: the places in libraries behind the line."]
    ]


class Slice(TypedDict):
    """A part of a program along the flow of values."""

    equations: Annotated[int, "How many equations it has, where they run."]
    of: Annotated[int, "How many the program has."]
    lines: Annotated[list[SlicedLine], "The lines that they come from, in the program's order."]
    results: NotRequired[Annotated[list[str], "Forward: the results that it ends in."]]
    arguments: NotRequired[Annotated[list[str], "Back: the arguments that it begins with."]]


class GradientStop(TypedDict):
    """An operation that stops a gradient: its derivative is zero."""

    primitive: Annotated[str, "Its primitive, or the function with a custom rule."]
    source: Annotated[str, "The user's line that it comes from; empty if that is not known."]


class GradientFlow(TypedDict):
    """What becomes of the gradient by an argument."""

    zero: Annotated[list[str], "The results that depend on it, with a gradient of zero."]
    reached: Annotated[list[str], "The results whose gradient may be another."]
    stops: Annotated[list[GradientStop], "The operations that stop the gradient on its way."]


class WhyDocument(TypedDict):
    """`why`: what a point of a program touches, and what it depends on."""

    name: Annotated[str, "The name of the program."]
    what: Annotated[str, "What the point is called."]
    kind: Annotated[str, "What it is: `argument`, `result`, `line` or `variable`."]
    forward: NotRequired[Annotated[Slice, "All that it touches."]]
    back: NotRequired[Annotated[Slice, "All that it depends on."]]
    gradient: NotRequired[Annotated[GradientFlow, "Of an argument: what stops the gradient by it."]]


class PathStep(TypedDict):
    """An equation that a value passes through."""

    primitive: Annotated[str, "Its primitive."]
    type: Annotated[str, "The type of the value behind it, or in its body."]
    depth: Annotated[int, "In how many bodies it is."]
    source: Annotated[str, "The user's line that it comes from; empty if that is not known."]


class PathDocument(TypedDict):
    """`why --path`."""

    name: Annotated[str, "The name of the program."]
    start: Annotated[str, "Where the path begins."]
    end: Annotated[str, "Where it ends."]
    steps: Annotated[list[PathStep] | None, "The equations between; null if there is no way."]


# --- outline ----------------------------------------------------------------------------------


class SourceRange(TypedDict):
    """Lines of a source file."""

    file: Annotated[
        str, "The path: from the folder of the user's files, or of a library from its package on."
    ]
    first: Annotated[int, "The first line, from 1."]
    last: Annotated[int, "The last line."]


class RepeatedBody(TypedDict):
    """A body that a program calls more than once, where the program or another body calls it."""

    name: Annotated[str, "The name of its calls."]
    copies: Annotated[int, "How often it is called from there, by all copies of the caller."]
    equations: Annotated[
        int, "How many equations a copy has, those of the bodies that it calls included."
    ]
    share: Annotated[float, "The part of the program's equations that these are, from 0 to 1."]
    source: Annotated[
        SourceRange | None, "The lines that its equations come from; null where they are unknown."
    ]
    bodies: Annotated[
        list[RepeatedBody], "The bodies that it calls, told where the body stands first."
    ]


class EstimatedMemory(TypedDict):
    """The temporary memory of an outlined program, in bytes, as estimated."""

    as_traced: Annotated[int, "What it would need if the calls were inlined."]
    outlined: Annotated[int, "What it needs."]


class Repetition(TypedDict):
    """What a program repeats."""

    name: Annotated[str, "The name of the program."]
    equations: Annotated[int, "How many equations it has, calls that were opened not counted."]
    compiled: Annotated[int, "How many equations XLA compiles after `outline`, calls included."]
    rest: Annotated[int, "How many equations are in no repeated body."]
    left_to_partitioner: Annotated[
        list[str],
        "Arguments, results and equations with a sharding over several devices: arrays are whole.",
    ]
    bodies: Annotated[
        list[RepeatedBody], "The repeated bodies that it calls, the largest part of it first."
    ]
    small: Annotated[
        list[RepeatedBody],
        "If there are none: what repeats and would gain too little, unless `--equations` is given.",
    ]
    memory: Annotated[
        EstimatedMemory | None, "What the calls cost; null if there are none, or it is not known."
    ]


class Memory(TypedDict):
    """The memory of a compiled program, in bytes."""

    arguments: Annotated[int, "What it takes."]
    outputs: Annotated[int, "What it gives."]
    temporary: Annotated[int, "What it needs besides while it runs."]


class Measurement(TypedDict):
    """How a program was compiled and run. Times are in seconds."""

    lower: Annotated[float | None, "Lowering; null under `jax_disable_jit`."]
    compile: Annotated[float | None, "Compiling; null under `jax_disable_jit`."]
    compile_cpu: Annotated[float | None, "The CPU time of all threads meanwhile."]
    first_call: Annotated[float, "The first call."]
    repeat: Annotated[float | None, "The median of the calls after it; null if there were none."]
    repeats: Annotated[int, "How many these were."]
    memory: Annotated[Memory | None, "Its memory; null where the backend does not say."]


class Measurements(TypedDict):
    """A program measured as traced, and outlined."""

    devices: Annotated[list[str], "Where both ran: `cpu:0`."]
    random: Annotated[list[str], "The arguments that were filled with random values."]
    trace: Annotated[float, "How long tracing and the passes before took, in seconds."]
    outline: Annotated[float, "How long `outline` took, in seconds."]
    as_traced: Annotated[Measurement, "The program as it was traced."]
    outlined: Annotated[Measurement | None, "The program outlined; null if nothing repeats."]


class OutlineDocument(TypedDict):
    """`outline`."""

    programs: Annotated[
        list[Repetition], "What is repeated; several programs if a pass has given several."
    ]
    measured: NotRequired[Annotated[Measurements, "With `--compile`: what both take."]]
