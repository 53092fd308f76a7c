"""The variables of init and apply as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxprtool.commands.run.table import RunDocument
from jaxprtool.ir.documents import Number, document
from jaxprtool.ir.equations import size_of, type_of
from jaxprtool.ir.frames import short_paths
from jaxprtool.ir.program import NamedValue
from jaxprtool.ir.source_text import BEHIND, Place
from jaxprtool.render.documents.programs import Program
from jaxprtool.render.reports import values_table
from jaxprtool.render.terminal.listing import ShowOptions, SourceComments
from jaxprtool.render.terminal.tables import Rendering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxprtool.ir.frames import Frames, Root
    from jaxprtool.passes.unzip import VariableLeaf


def variables_table(
    variables: Sequence[VariableLeaf], width: int, roots: Sequence[Root], top: int | None
) -> Rendering:
    """Return a table of the first `top` variables (all if None), with their lines."""
    named = [NamedValue(v.path, type_of(v.aval), size_of(v.aval)) for v in variables]
    comments = SourceComments(ShowOptions(source=True), roots)
    sources = ["".join(comments.location(v.eqn)) for v in variables]
    if not any(sources):  # variables that are arguments have no line
        return Rendering(values_table("variable", named, None, top), width)
    table = values_table("variable", named, sources, top)
    if max(map(len, Rendering(table, 1000).plain().splitlines())) > width:
        table = values_table("variable", named, _shorter(sources), top)
    return Rendering(table, width)


def _shorter(sources: Sequence[str]) -> list[str]:
    """Return locations with as few folders as distinguish the files."""
    chains = [source.split(BEHIND) for source in sources]
    locations = list(dict.fromkeys(location for chain in chains for location in chain))
    short = dict(zip(locations, short_paths(locations), strict=True))
    return [BEHIND.join(short[location] for location in chain) for chain in chains]


def variable_document(variable: VariableLeaf, frames: Frames) -> Variable:
    """Return the document of a variable."""
    aval = variable.aval
    return Variable(
        variable.path,
        type_of(aval),
        aval.shape,
        str(aval.dtype),
        size_of(aval),
        frames.place(frames.location(variable.eqn)),
    )


class Variable(NamedTuple):
    """A variable: a result of init and an argument of apply."""

    name: Annotated[str, "Its path: `first/w`."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    shape: Annotated[Sequence[Number], "Its dimensions; a symbolic one as text."]
    dtype: Annotated[str, "Its dtype, as NumPy calls it."]
    bytes: Annotated[int | None, "Its size in bytes; null if unknown."]
    place: Annotated[Place, "The line that declares it; null if unknown."]


@document(optional=("runs",))
class UnzipDocument(NamedTuple):
    """`unzip`."""

    variables: Annotated[list[Variable], "The variables, in the order in which they are declared."]
    programs: Annotated[list[Program], "init and apply, after the passes."]
    runs: Annotated[list[RunDocument] | None, "With `--run`: the runs of init and apply."] = None
