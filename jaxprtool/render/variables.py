"""The variables between init and apply, as a table and as JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jaxprtool import jaxcompat
from jaxprtool.ir.border import NamedValue
from jaxprtool.ir.equations import size_of, type_of
from jaxprtool.render.comments import SourceComments
from jaxprtool.render.documents import Variable
from jaxprtool.render.rendering import Rendering, ShowOptions
from jaxprtool.render.stats import values_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxprtool.passes.unzip.programs import VariableLeaf


def variables_table(variables: Sequence[VariableLeaf], width: int) -> Rendering:
    """Return a table of variables, with the lines that declare them."""
    comments = SourceComments(ShowOptions(source=True))
    named = [NamedValue(v.path, type_of(v.aval), size_of(v.aval)) for v in variables]
    lines = [comments.line(v.eqn) or "" for v in variables]
    sources = lines if any(lines) else None  # variables that are arguments come from no line
    table = values_table("variable", named, sources)
    if sources and max(map(len, Rendering(table, 1000).plain().splitlines())) > width:
        table = values_table("variable", named, list(map(os.path.basename, sources)))
    return Rendering(table, width)


def variable_document(variable: VariableLeaf) -> Variable:
    """Return the document of a variable."""
    aval, frame = variable.aval, jaxcompat.user_frame(variable.eqn)
    return {
        "name": variable.path,
        "type": type_of(aval),
        "shape": [size if isinstance(size, int) else str(size) for size in aval.shape],
        "dtype": str(aval.dtype),
        "bytes": size_of(aval),
        "source": {"file": frame[0], "line": frame[1]} if frame else None,
    }
