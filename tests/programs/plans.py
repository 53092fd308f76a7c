"""The plan of a random program: plain data that prints as the Python code that makes it.

A plan is drawn by hypothesis (`random_programs.py`) and run under JAX's tracer (`build.py`).
Operands are *backward references*: 0 is the newest visible value, 1 the one before, and so on,
wrapping around. So every plan is well formed, even after shrinking. Operands are converted to the
required types, so every plan is well typed too.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.programs.ops import Type

Ref = int


@dataclass(frozen=True)
class Block:
    """A body: inputs of the given types, steps that each add values, and outputs."""

    inputs: tuple[Type, ...] = ()
    steps: tuple[Step, ...] = ()
    outputs: tuple[Ref, ...] = (0,)


@dataclass(frozen=True)
class Op:
    """One operation of `ops.OPS` or `ops.COLLECTIVES` on operands of one type."""

    name: str
    type: Type
    args: tuple[Ref, ...]


@dataclass(frozen=True)
class Const:
    """An array that the traced function captures. A scalar becomes a literal."""

    type: Type
    seed: int


@dataclass(frozen=True)
class Call:
    """A body called through `how`: jit, remat, custom_jvp, custom_vjp or custom_vjp_saving.

    The bodies of jit and remat can use values of the enclosing body. Those of custom rules cannot.
    """

    how: str
    body: Block
    args: tuple[Ref, ...]


@dataclass(frozen=True)
class Shared:
    """A call of the plan's jitted function number `function`, shared by all its calls."""

    function: int
    args: tuple[Ref, ...]


@dataclass(frozen=True)
class Scan:
    """A scan whose first body inputs are the carry, initially `init`. The others are sliced."""

    body: Block
    init: tuple[Ref, ...]
    xs: tuple[Ref, ...]
    length: int
    reverse: bool = False
    unroll: int = 1


@dataclass(frozen=True)
class While:
    """A loop of at most `limit` iterations. `early` also stops on a value."""

    body: Block
    init: tuple[Ref, ...]
    limit: int
    traced_limit: bool = False
    early: bool = False


@dataclass(frozen=True)
class Cond:
    """A `cond` for two branches, `switch` for more. Each returns values of types `outs`."""

    branches: tuple[Block, ...]
    index: Ref
    args: tuple[Ref, ...]
    outs: tuple[Type, ...]


@dataclass(frozen=True)
class Effect:
    """A callback that records its operand: debug, ordered_debug, io, ordered_io or pure."""

    how: str
    arg: Ref


@dataclass(frozen=True)
class Mutate:
    """A new ref, written at top level or inside `within`: jit, scan, cond or while."""

    type: Type
    init: Ref
    arg: Ref
    within: str = "here"
    read: bool = True


@dataclass(frozen=True)
class Detail:
    """A few equations on two values, in which copies of a body may differ.

    `scale` is a literal, `swapped` reorders the operands of an equation, `backwards` is a
    parameter, `weak` adds a weakly typed scalar, `effect` adds a callback on the result.
    """

    type: Type
    args: tuple[Ref, Ref]
    scale: float = 2.0
    swapped: bool = False
    backwards: bool = False
    weak: bool = False
    effect: bool = False


#: How one copy may differ from the others: in a `Detail`, in all shapes, or in an inner scope.
DIFFERENCES = ("scale", "swapped", "backwards", "weak", "effect", "shape", "scope")


@dataclass(frozen=True)
class Copy:
    """One copy of a body: its operands, how it differs, and its wrapper.

    It is inlined if `how` is empty, or a call as in `Call`, or "donating": a `jit` that donates its
    first operand.
    """

    args: tuple[Ref, ...]
    difference: str = ""
    how: str = ""


@dataclass(frozen=True)
class Stack:
    """An argument of a program: for each of `count` layers an array of each type, as a tree.

    It is a list of dicts, a dict of tuples or a tuple of lists, one for each layer; or "columns": a
    dict of lists, one for each type. With `leaks` the program also uses the first array on its own.
    """

    types: tuple[Type, ...]
    count: int
    tree: str = "list"
    leaks: bool = False


@dataclass(frozen=True)
class Repeat:
    """Copies of a body in sequence, with the steps `between` before each.

    If `chained`, the outputs of a copy are the inputs of the next one where possible, in addition
    to values from before the copies. If `closed`, copies close over no values, else all close over
    the same ones. If `scoped`, each has a name scope. The last inputs of the copies are the arrays
    of one layer of the program's argument number `stack`, starting with the last layer if
    `reverse`.
    """

    body: Block
    copies: tuple[Copy, ...]
    between: tuple[Step, ...] = ()
    chained: bool = False
    closed: bool = False
    scoped: bool = False
    stack: int | None = None
    reverse: bool = False


Step = Op | Const | Call | Shared | Scan | While | Cond | Effect | Mutate | Detail | Repeat


@dataclass(frozen=True)
class Plan:
    """A whole program: argument types, functions shared by several calls, the body.

    `seed` determines the argument values. `specials` puts NaN, infinities and signed zeros among
    them. A scalar argument in `weak` is a Python number, which JAX types weakly. A program that
    `trains` also returns its arguments, each float moved by its gradient.
    """

    body: Block
    functions: tuple[Block, ...] = ()
    seed: int = 0
    specials: bool = False
    weak: bool = False
    x64: bool = False
    stacks: tuple[Stack, ...] = ()
    trains: bool = False
