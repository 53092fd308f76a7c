"""Running of the two programs of `unzip`: init, and apply on its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxprtool.errors import OutputError, PipelineError
from jaxprtool.execute.running.fill import Filled, fill
from jaxprtool.execute.running.run import RunReport, choose_device, run
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.ref_contents import with_contents
from jaxprtool.ir.programs.trees import leaf_paths


@dataclass(frozen=True)
class InitApplyReport:
    """The runs of init and apply.

    Attributes:
        init: The run of init.
        apply: The run of apply.
        variables: The variables, by path.
        filled: The arguments of the whole program, and which of them are random.
    """

    init: RunReport
    apply: RunReport
    variables: dict[str, jax.Array]
    filled: Filled


def run_init_apply(
    whole: Program,
    parts: Mapping[str, Program],
    arguments: Sequence[object],
    seed: int,
    platform: str | None,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> InitApplyReport:
    """Run init, and apply on its results, with the arguments that `run` would use.

    Args:
        whole: The program before the split.
        parts: `init` and `apply`.
        arguments: The flat arguments of the whole: arrays, or types to be filled.
        seed: The seed of random values.
        platform: The platform to run on; None for JAX's default.
        on_progress: Called with progress messages: "compiling init".

    Raises:
        PipelineError: If `parts` are not init and apply.
        OutputError: If two variables have the same path.
        ArgumentsError: As in `fill`.
    """
    if parts.keys() != {"init", "apply"}:
        names = ", ".join(parts)
        raise PipelineError(f"--run takes init and apply, but the passes returned {names}")
    whole, init, apply = map(with_contents, (whole, parts["init"], parts["apply"]))
    filled = fill(whole, dict(zip(whole.arg_names, arguments, strict=True)), seed)
    values = dict(zip(whole.arg_names, filled.arguments, strict=True))
    device = choose_device(init, platform, None)
    made = run(init, fill(init, values).arguments, device, 0, on_progress)
    paths = leaf_paths(init.out_tree)
    variables = dict(zip(paths, (out.value for out in made.outputs), strict=True))
    if len(variables) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise OutputError(f"two variables have the path '{twice}'")
    values |= {out.name: out.value for out in made.outputs}
    device = choose_device(apply, platform, None)
    given = run(apply, fill(apply, values).arguments, device, on_progress=on_progress)
    return InitApplyReport(made, given, variables, filled)
