"""The commands, one chapter each: a computation, its table, and what the command line does.

This page declares them: what `jaxprtool --help` lists, and where the function of a command, its
documents and its tables are. The modules that it names are imported when a command is called. Each
declaration is an entry point `jaxprtool.commands`, as those of plug-ins are.
"""

from jaxprtool.registry import CommandInfo

# --- Look -----------------------------------------------------------------------------------------

SHOW = CommandInfo(
    panel="Look",
    position=1,
    summary="Show a function's jaxpr in JAX's own notation.",
    run="jaxprtool.commands.show.command:show_command",
    documents=(
        "jaxprtool.commands.show.command:ShowDocument",
        "jaxprtool.commands.show.command:StatsDocument",
        "jaxprtool.commands.show.page:ModuleListingDocument",
        "jaxprtool.recording.recorded_run:Run",
    ),
    tables={
        "jaxprtool.analysis.stats:Stats": "jaxprtool.commands.show.table:stats_tables",
    },
)

BROWSE = CommandInfo(
    panel="Look",
    position=2,
    summary="Browse a jaxpr on the full screen, beside its source.",
    run="jaxprtool.commands.browse.command:browse_command",
)

SOURCE = CommandInfo(
    panel="Look",
    position=3,
    summary="Show each source line with its FLOPs, bytes and residuals.",
    run="jaxprtool.commands.source.command:source_command",
    documents=("jaxprtool.commands.source.table:SourceDocument",),
    tables={
        "jaxprtool.commands.source.lines:Source": "jaxprtool.commands.source.table:source_text",
    },
)

DIFF = CommandInfo(
    panel="Look",
    position=4,
    summary="Show by line which equations differ between two programs.",
    run="jaxprtool.commands.diff.command:diff_command",
    documents=(
        "jaxprtool.commands.diff.table:DiffDocument",
        "jaxprtool.commands.diff.modules:ModuleDiff",
    ),
    tables={
        "jaxprtool.commands.diff.modules:ModuleDiff": "jaxprtool.commands.diff.table:module_diff_table",
        "jaxprtool.commands.diff.diff:Diff": "jaxprtool.commands.diff.table:diff_text",
    },
)

WHY = CommandInfo(
    panel="Look",
    position=5,
    summary="Show what a value affects, and why a gradient is zero.",
    run="jaxprtool.commands.why.command:why_command",
    documents=(
        "jaxprtool.commands.why.slices:Why",
        "jaxprtool.commands.why.slices:Path",
        "jaxprtool.commands.why.gradients:GradientAnswer",
    ),
    tables={
        "jaxprtool.commands.why.gradients:GradientAnswer": "jaxprtool.commands.why.table:gradient_text",
        "jaxprtool.commands.why.slices:Path": "jaxprtool.commands.why.table:path_text",
        "jaxprtool.commands.why.slices:Why": "jaxprtool.commands.why.table:slices_by_line",
    },
)

# --- Measure --------------------------------------------------------------------------------------

COST = CommandInfo(
    panel="Measure",
    position=1,
    summary="Estimate FLOPs and memory traffic; --measure also times it.",
    run="jaxprtool.commands.cost.command:cost_command",
    rules={"cost": "jaxprtool.commands.cost.rules:cost_rules"},
    documents=("jaxprtool.commands.cost.table:CostDocument",),
    tables={
        "jaxprtool.commands.cost.estimate:Cost": "jaxprtool.commands.cost.table:cost_table",
    },
)

KERNELS = CommandInfo(
    panel="Measure",
    position=2,
    summary="Count a program's Pallas kernels: FLOPs, HBM bytes and VMEM.",
    run="jaxprtool.commands.kernels.command:kernels_command",
    documents=("jaxprtool.commands.kernels.table:KernelsDocument",),
    tables={
        "jaxprtool.commands.kernels.kernels:KernelReport": "jaxprtool.commands.kernels.table:kernels_table",
    },
)

MEMORY = CommandInfo(
    panel="Measure",
    position=2,
    summary="Estimate the peak memory, and list what is live at the peak.",
    run="jaxprtool.commands.memory.command:memory_command",
    rules={"memory": "jaxprtool.commands.memory.walk:workspace_rules"},
    documents=(
        "jaxprtool.commands.memory.table:MemoryDocument",
        "jaxprtool.commands.memory.table:ModuleMemoryDocument",
    ),
    tables={
        "jaxprtool.commands.memory.compiled:CompiledPeak": "jaxprtool.commands.memory.table:compiled_table",
        "jaxprtool.commands.memory.estimate:Memory": "jaxprtool.commands.memory.table:memory_table",
    },
)

RESIDUALS = CommandInfo(
    panel="Measure",
    position=3,
    summary="Show the values that a gradient keeps for its backward pass.",
    run="jaxprtool.commands.residuals.command:residuals_command",
    documents=("jaxprtool.commands.residuals.residuals:Residuals",),
    tables={
        "jaxprtool.commands.residuals.residuals:Residuals": "jaxprtool.commands.residuals.table:residuals_table",
    },
)

PROFILE = CommandInfo(
    panel="Measure",
    position=4,
    summary="Time a compiled function by your lines, with JAX's profiler.",
    run="jaxprtool.commands.profile.command:profile_command",
    documents=(
        "jaxprtool.commands.profile.lines:Profile",
        "jaxprtool.commands.cost.table:CostDocument",
    ),
    tables={
        "jaxprtool.commands.profile.lines:Profile": "jaxprtool.commands.profile.table:profile_table",
    },
)

BENCH = CommandInfo(
    panel="Measure",
    position=5,
    summary="Time variants in turns, with confidence intervals of ratios.",
    run="jaxprtool.commands.bench.command:bench_command",
    documents=("jaxprtool.commands.bench.bench:Bench",),
    tables={
        "jaxprtool.commands.bench.bench:Bench": "jaxprtool.commands.bench.command:bench_table",
    },
)

OUTLINE = CommandInfo(
    panel="Measure",
    position=6,
    summary="Show code that repeats, and what shortens compilation.",
    run="jaxprtool.commands.outline.command:outline_command",
    documents=("jaxprtool.commands.outline.table:OutlineDocument",),
)

REPORT = CommandInfo(
    panel="Measure",
    position=7,
    summary="Write an HTML report: each pass, cost, memory and residuals.",
    run="jaxprtool.commands.report.command:report_command",
    documents=("jaxprtool.commands.report.command:ReportDocument",),
)

# --- Run and debug --------------------------------------------------------------------------------

RECORD = CommandInfo(
    panel="Run and debug",
    position=1,
    summary="Run a script; record what JAX compiles, and why it recompiles.",
    run="jaxprtool.commands.record.command:record_command",
    documents=("jaxprtool.recording.recorded_run:Run",),
    tables={
        "jaxprtool.recording.recorded_run:Run": "jaxprtool.commands.record.table:run_summary",
    },
)

RUN = CommandInfo(
    panel="Run and debug",
    position=2,
    summary="Compile a function, run it, and show its results and times.",
    run="jaxprtool.commands.run.command:run_command",
    documents=("jaxprtool.commands.run.table:RunDocument",),
)

NANS = CommandInfo(
    panel="Run and debug",
    position=3,
    summary="Find the equation that produces the first NaN or infinity.",
    run="jaxprtool.commands.nans.command:nans_command",
    documents=("jaxprtool.commands.nans.command:NansDocument",),
    tables={
        "jaxprtool.commands.nans.nans:NanSearch": "jaxprtool.commands.nans.command:first_found",
    },
)

WATCH = CommandInfo(
    panel="Run and debug",
    position=4,
    summary="Run a function and summarize its intermediate values.",
    run="jaxprtool.commands.watch.command:watch_command",
    documents=("jaxprtool.commands.watch.watch:Watched",),
    tables={
        "jaxprtool.commands.watch.watch:Watched": "jaxprtool.commands.watch.command:watched_text",
    },
)

COMPARE = CommandInfo(
    panel="Run and debug",
    position=5,
    summary="Measure how the results of variants of a function differ.",
    run="jaxprtool.commands.compare.command:compare_command",
    documents=("jaxprtool.commands.compare.divergence:Comparison",),
    tables={
        "jaxprtool.commands.compare.divergence:Comparison": "jaxprtool.commands.compare.table:comparison_tables",
    },
)

PRECISION = CommandInfo(
    panel="Run and debug",
    position=6,
    summary="Find the lines that have to stay in f32.",
    run="jaxprtool.commands.precision.command:precision_command",
    documents=("jaxprtool.commands.compare.variants:Precision",),
    tables={
        "jaxprtool.commands.compare.variants:Precision": "jaxprtool.commands.precision.command:precision_text",
    },
)

DETERMINISM = CommandInfo(
    panel="Run and debug",
    position=7,
    summary="Run a function in several ways, and compare results bitwise.",
    run="jaxprtool.commands.determinism.command:determinism_command",
    documents=("jaxprtool.commands.compare.divergence:Determinism",),
    tables={
        "jaxprtool.commands.compare.divergence:Determinism": "jaxprtool.commands.determinism.table:determinism_table",
    },
)

REDUCE = CommandInfo(
    panel="Run and debug",
    position=8,
    summary="Shrink a function while a check holds, to reproduce a fault.",
    run="jaxprtool.commands.reduce.command:reduce_command",
    documents=("jaxprtool.commands.reduce.reduction:Reduction",),
)

UPGRADE = CommandInfo(
    panel="Run and debug",
    position=9,
    summary="Show what changes in another environment, such as a newer JAX.",
    run="jaxprtool.commands.upgrade:upgrade_command",
    documents=("jaxprtool.commands.upgrade:UpgradeDocument",),
)

# --- Rewrite and export ---------------------------------------------------------------------------

OPT = CommandInfo(
    panel="Rewrite and export",
    position=1,
    summary="Run passes over a function's jaxpr and print the result.",
    run="jaxprtool.commands.opt.command:opt_command",
    documents=("jaxprtool.commands.opt.command:OptDocument",),
)

EMIT = CommandInfo(
    panel="Rewrite and export",
    position=2,
    summary="Export to Python, StableHLO, HLO, a graph or jax.export.",
    run="jaxprtool.commands.emit:emit_command",
    documents=("jaxprtool.commands.emit:EmitDocument",),
)

UNZIP = CommandInfo(
    panel="Rewrite and export",
    position=3,
    summary="Split a function into init and apply, by its variables.",
    run="jaxprtool.commands.unzip.command:unzip_command",
    documents=("jaxprtool.commands.unzip.table:UnzipDocument",),
)

VMAP = CommandInfo(
    panel="Rewrite and export",
    position=4,
    summary="Map a function over an axis, as jax.vmap does.",
    run="jaxprtool.commands.vmap:vmap_command",
    documents=("jaxprtool.commands.vmap:VmapDocument",),
)

SHAPECHECK = CommandInfo(
    panel="Rewrite and export",
    position=5,
    summary="Check the types of results for all sizes of the arguments.",
    run="jaxprtool.commands.shapecheck:shapecheck_command",
    documents=("jaxprtool.commands.shapecheck:ClaimDocument",),
)

# --- Several devices ------------------------------------------------------------------------------

SHARDINGS = CommandInfo(
    panel="Several devices",
    position=1,
    summary="Show how XLA partitions a function over devices, by line.",
    run="jaxprtool.commands.shardings.command:shardings_command",
    documents=("jaxprtool.commands.shardings.partitions:Shardings",),
    tables={
        "jaxprtool.commands.shardings.partitions:Shardings": "jaxprtool.commands.shardings.table:shardings_tables",
    },
)

BACKENDS = CommandInfo(
    panel="Several devices",
    position=2,
    summary="List the backends and devices, and those that do not start.",
    run="jaxprtool.commands.backends:backends_command",
    documents=("jaxprtool.commands.backends:BackendsDocument",),
)

# --- In your repository ---------------------------------------------------------------------------

CHECK = CommandInfo(
    panel="In your repository",
    position=1,
    summary="Check the budgets in pyproject.toml.",
    run="jaxprtool.commands.check.command:check_command",
    documents=("jaxprtool.render.documents:CheckDocument",),
)

LINT = CommandInfo(
    panel="In your repository",
    position=2,
    summary="Find wasted memory and time, and likely mistakes.",
    run="jaxprtool.commands.lint.command:lint_command",
    documents=("jaxprtool.commands.lint.lint:Findings",),
    tables={
        "jaxprtool.commands.lint.lint:Findings": "jaxprtool.commands.lint.table:findings_by_line",
    },
)

# --- Reference ------------------------------------------------------------------------------------

EXPLAIN = CommandInfo(
    panel="Reference",
    position=1,
    summary="List the passes; describe a pass, a pipeline, a primitive or a lint code.",
    run="jaxprtool.commands.explain.command:explain_command",
    documents=(
        "jaxprtool.commands.explain.command:PassesDocument",
        "jaxprtool.commands.explain.command:PassDocument",
        "jaxprtool.commands.explain.command:PipelineDocument",
        "jaxprtool.commands.explain.command:PrimitiveDocument",
        "jaxprtool.commands.explain.command:LintRuleDocument",
    ),
)

SERVE = CommandInfo(
    panel="Reference",
    position=3,
    summary="Answer commands from a warm process, for editors and agents.",
    run="jaxprtool.commands.serve.command:serve_command",
)

SKILL = CommandInfo(
    panel="Reference",
    position=4,
    summary="Print a page for coding agents: which command answers what.",
    run="jaxprtool.commands.skill.command:skill_command",
)
