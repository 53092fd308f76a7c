"""Documents that commands assemble: of programs, and of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple, NotRequired, TypedDict

from jaxprtool.ir.documents import document
from jaxprtool.ir.program import NamedValue
from jaxprtool.ir.source_text import Place

if TYPE_CHECKING:
    pass

# --- programs -------------------------------------------------------------------------------------
# Documents of programs, and of the commands that show, rewrite and run them.

# --- files ------------------------------------------------------------------------------------


# --- programs ---------------------------------------------------------------------------------


class Binder(TypedDict):
    """A variable where it is bound."""

    variable: Annotated[str, "Its name in the listing, unique in the program except for `_`."]
    type: NotRequired[Annotated[str, "Its type, as a jaxpr prints it; left out with `--no-types`."]]


class Operand(TypedDict):
    """A variable, or a literal, where it is used."""

    variable: NotRequired[Annotated[str, "The name of the variable."]]
    literal: NotRequired[
        Annotated[str, "Instead of `variable`: the literal's value, as a jaxpr prints it."]
    ]
    type: NotRequired[Annotated[str, "The type of the literal."]]


@document(flat=("value", "atom"))
class BoundValue(NamedTuple):
    """An argument, a constant or an output of a program: its names, its type and its bytes."""

    value: NamedValue
    atom: Operand


class HeldJaxpr(TypedDict):
    """A jaxpr among the parameters of an equation: one of `shared`, `jaxpr` and `folded`."""

    parameter: Annotated[str, "The parameter that holds it: `jaxpr`, `branches[0]`."]
    shared: NotRequired[Annotated[str, "The name of a Body in the program's `shared`."]]
    jaxpr: NotRequired[Annotated[Body, "The jaxpr itself."]]
    folded: NotRequired[
        Annotated[int, "The number of its equations, if it is deeper than `--depth`."]
    ]


class Equation(TypedDict):
    """An equation."""

    primitive: Annotated[str, "The name of its primitive."]
    inputs: Annotated[list[Operand], "Its operands."]
    outputs: Annotated[list[Binder], "The variables that it binds."]
    parameters: Annotated[
        dict[str, str], "Its parameters by name, as text; the jaxprs among them are in `bodies`."
    ]
    bodies: Annotated[list[HeldJaxpr], "The jaxprs that it holds."]
    effects: NotRequired[Annotated[list[str], "Its effects, as text, if it has any."]]
    place: NotRequired[Annotated[Place, "The user's line, if known."]]
    scope: NotRequired[Annotated[str, "Its name stack, if it has one."]]


class Skipped(TypedDict):
    """Equations that `--only` or `--depth` leave out."""

    skipped: Annotated[int, "The number of equations."]


class Body(TypedDict):
    """A jaxpr in a program."""

    constants: Annotated[list[Binder], "The variables of its constants."]
    arguments: Annotated[list[Binder], "Its arguments."]
    equations: Annotated[list[Equation | Skipped], "Its equations, in order."]
    outputs: Annotated[list[Operand], "Its results."]


class Program(TypedDict):
    """A program."""

    name: Annotated[str, "The name of the function."]
    arguments: Annotated[list[BoundValue], "Its arguments, in order."]
    constants: Annotated[list[BoundValue], "Its constants."]
    outputs: Annotated[list[BoundValue], "Its results."]
    effects: Annotated[list[str], "Its effects, as text."]
    equations: Annotated[list[Equation | Skipped], "Its equations, in order."]
    shared: Annotated[dict[str, Body], "The jaxprs that several equations share, by name."]


# --- show, opt --------------------------------------------------------------------------------


@document(names={"step": "pass"})
class PassRun(NamedTuple):
    """The effect of a pass on a program."""

    step: Annotated[str, "The pass, with its options."]
    program: Annotated[str, "The name of the program."]
    seconds: Annotated[float, "The time of the pass."]
    equations_before: Annotated[int, "The number of equations before the pass."]
    equations_after: Annotated[int, "The number of equations after the pass."]


# --- run --------------------------------------------------------------------------------------


# --- unzip, vmap ------------------------------------------------------------------------------


# --- found ----------------------------------------------------------------------------------------
# Documents assembled from findings.
