"""Descriptions of passes, pipelines and primitives."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Reference",
    position=1,
    summary="List the passes; describe a pass, a pipeline, a primitive or a lint code.",
    run="jaxprtool.commands.explain.command:explain_command",
    documents=(
        "jaxprtool.commands.explain.explanation:PassesDocument",
        "jaxprtool.commands.explain.explanation:PassDocument",
        "jaxprtool.commands.explain.explanation:PipelineDocument",
        "jaxprtool.commands.explain.explanation:PrimitiveDocument",
        "jaxprtool.commands.explain.explanation:LintRuleDocument",
    ),
)
