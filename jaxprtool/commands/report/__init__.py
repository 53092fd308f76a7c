"""The page of a program: each pass, cost, memory and residuals."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=7,
    summary="Write an HTML report: each pass, cost, memory and residuals.",
    run="jaxprtool.commands.report.command:report_command",
    documents=("jaxprtool.commands.report.command:ReportDocument",),
)
