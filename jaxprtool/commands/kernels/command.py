"""`jaxprtool kernels`: the Pallas kernels of a program, and whether they fit."""

from __future__ import annotations

from typing import Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, command, only_program

_Steps = Annotated[
    int,
    Panel("Kernels").option(
        "--steps", "N", "Also list the blocks of the first N steps of each grid.", min=0
    ),
]

_Fit = Annotated[
    bool,
    Panel("Kernels").flag(
        "--fit",
        "List other block sizes for which each kernel computes the same, and fits: the best first.",
    ),
]
_Backend = Annotated[
    str | None,
    options.backend_option(
        "Compile each kernel alone, and the block sizes of --fit, for a TPU. With the package "
        "libtpu, this machine may lack it: tpu:v5e:2x2.",
        Panel("Kernels"),
    ),
]

_Out = Annotated[
    str | None,
    options.out_option(
        "Also draw which block each step reads or writes, with matplotlib.", "FILE.svg|FILE.png"
    ),
]


@command
def kernels_command(
    session: Session,
    device: options.ModeledDevice = None,
    steps: _Steps = 0,
    fit: _Fit = False,
    backend: _Backend = None,
    out: _Out = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Count a program's Pallas kernels: FLOPs, HBM bytes and VMEM.

    FLOPs are those of the body, in each step of the grid. A block is copied only if it is not that
    of the step before. VMEM has two buffers of a block that depends on the step, padded to tiles.
    With --device, also show the minimum time of a call, and whether the kernel fits. With --fit,
    list other block sizes, each compiled if --backend names a TPU.

    [bold]Example[/]

      jaxprtool kernels jax.experimental.pallas.ops.tpu.example_kernel:double --args "f32[8,128]"
    """
    most = options.row_limit(top, all)
    picture_format = None if out is None else output.figure_format(out)
    session.start()
    from jaxprtool.commands.kernels import table as render
    from jaxprtool.commands.kernels.kernels import kernels, modeled_device
    from jaxprtool.commands.kernels.table import MOST_DRAWN, KernelsDocument, kernels_picture

    modeled_device(device, backend, fit)  # before the function is traced
    named = session.programs(session.traced())
    programs = [program for _, program in named]
    session.on_progress("counting" if backend is None else "compiling")
    reports = [kernels(program, device, steps, fit=fit, backend=backend) for program in programs]
    if out is not None and picture_format is not None:
        only_program("-o takes", named)
        session.on_progress("drawing")
        first = kernels(programs[0], steps=steps or MOST_DRAWN)
        with output.written_file(out) as file:
            file.write(kernels_picture(first, picture_format))
    if json:
        output.write_json(KernelsDocument(reports))
        return
    output.write_each(render.kernels_table(report, output.width(), most) for report in reports)
