"""Problems on stdout, in the formats that other programs read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxprtool.cli import output

if TYPE_CHECKING:
    from jaxprtool.cli.options import FormatChoice
    from jaxprtool.render.documents.problems import Problem


def write_problems(
    problems: Sequence[Problem], format: FormatChoice, failure: str | None = None
) -> None:
    """Write problems to stdout, with paths from the root of the git repository.

    Args:
        problems: The problems.
        format: "sarif" or "github".
        failure: Why the command could not look for problems; None if it did.
    """
    from jaxprtool import __version__
    from jaxprtool.render.documents.problems import Problem
    from jaxprtool.render.reports.problems import github_annotations, repository_root, sarif

    root = repository_root(os.getcwd())
    if format == "sarif":
        output.write_json(sarif(problems, __version__, root, _about(problems), failure))
    elif failure is not None:
        output.write(github_annotations([Problem("error", "", failure, ())], root))
    elif problems:
        output.write(github_annotations(problems, root))


def _about(problems: Sequence[Problem]) -> dict[str, str]:
    """Return the descriptions of the codes of problems."""
    if not problems:
        return {}
    from jaxprtool.analysis.lint.table import all_rules

    return {**_CHECKS, **{rule.code: rule.about for rule in all_rules()}}


#: Descriptions of the checks that are not rules of `lint`.
_CHECKS = {
    "flops": "The program takes more FLOPs than its budget.",
    "peak-bytes": "The program needs more memory at its peak than its budget.",
    "equations": "The program has more equations than its budget.",
    "residual-bytes": "The gradient keeps more between its passes than its budget.",
    "collectives-bytes": "Each device sends more than its budget.",
    "compiles": "The function compiles more programs than its budget.",
    "no": "The program has a primitive or a dtype that it may not have.",
    "donated": "Arguments are not donated, or their memory is not used.",
    "snapshot": "The program differs from its snapshot.",
    "error": "The program cannot be checked.",
}
