"""The Pallas kernels of a program: what they cost, what they copy, and whether they fit."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=2,
    summary="Count a program's Pallas kernels: FLOPs, HBM bytes and VMEM.",
    run="jaxprtool.commands.kernels.command:kernels_command",
    documents=("jaxprtool.commands.kernels.table:KernelsDocument",),
    tables=(
        (
            "jaxprtool.commands.kernels.kernels:KernelReport",
            "jaxprtool.commands.kernels.table:kernels_table",
        ),
    ),
)
