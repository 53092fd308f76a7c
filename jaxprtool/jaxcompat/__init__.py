"""The one package that imports `jax._src` or depends on the JAX release.

JAX's intermediate language differs from release to release: a closed jaxpr is a `ClosedJaxpr` in
0.10 and a plain `Jaxpr` in 0.12; `scan` counts its operands in 0.10 and has flat trees of them in
0.12. This package hides the differences.

A *closed* jaxpr below is what `jax.make_jaxpr` returns: a jaxpr with the values of its constants,
which has `.constvars`, `.consts`, `.invars`, `.outvars`, `.eqns`, `.effects` and `.debug_info`.
"""

from jax.extend.core import (
    AbstractToken,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_jaxpr_eqn,
)

from jaxprtool.jaxcompat.aliases import (
    AnyJaxpr,
    Atom,
    Aval,
    DType,
    Effect,
    MappedAxis,
    Params,
)
from jaxprtool.jaxcompat.batching import (
    NO_AXIS_NAME,
    NO_SOURCE,
    SCAN_LEAVES_CONSTS,
    VMAP_SCOPE,
    axes_of_spec,
    axis_data,
    axis_mapped,
    forbidden_in_branches,
    forbidden_in_loops,
    jaxs_batching_rules,
    manual_mesh,
    mapped_aval,
    mapped_sharding,
    match_axis,
    names_axis,
    renamed_effects,
    source_info,
    spec_with_entry,
    tracing_context,
    varying_alike,
)
from jaxprtool.jaxcompat.callbacks import (
    DEBUG_EFFECTS,
    FlatCallback,
    callback_function,
    checked_errors,
    flat_custom_vmap_trees,
    is_check_effect,
    numbered_errors,
)
from jaxprtool.jaxcompat.checking import (
    check_jaxpr,
    fits,
    inferred_types,
    inside_shard_map,
    registered_primitives,
)
from jaxprtool.jaxcompat.checkpointed import CheckpointedJvp, behind_barrier, has_barrier
from jaxprtool.jaxcompat.closed_over import (
    has_ended,
    holds_ended,
    some_ended,
    with_closed_over,
)
from jaxprtool.jaxcompat.custom_rules import (
    BWD_RETURNS_LOGS,
    OF_ONE_CALL,
    WRAPPERS,
    JVPRule,
    VJPRule,
    cells_of,
    custom_jvp_rule,
    custom_jvp_rule_param,
    custom_name,
    custom_vjp_rule,
    custom_vjp_rule_params,
    live_function,
    live_key,
    with_leading_consts,
)
from jaxprtool.jaxcompat.forward_mode import equation_jvp
from jaxprtool.jaxcompat.high import (
    CALL_HIGH,
    HighPrimitive,
    high_body,
    high_derivative,
    high_jvp_rule,
    high_key,
    high_name,
    high_vjp_rule,
    older_form,
    with_high_body,
)
from jaxprtool.jaxcompat.jaxprs import (
    ONE_JAXPR_CLASS,
    allocates_refs,
    allowed_in_loops,
    apply_jax_dce_rule,
    axes_bound,
    close_jaxpr,
    filter_debug_info,
    is_removable_effect,
    jax_dce_jaxpr,
    jax_dce_rules,
    new_jaxpr,
    only_names_axes,
    open_jaxpr,
    operand_effects,
    ordered_effects,
    policy_keeps,
    ref_of,
    replace_jaxpr,
    scan_count_params,
    scan_counts,
    short_dtype_name,
    stacked_aval,
    varying_axes,
    without_named_axes,
)
from jaxprtool.jaxcompat.jitted import (
    RefView,
    TracedOptions,
    at_once,
    captured_values,
    check_callable,
    hide_from_tracebacks,
    is_jitted,
    jit_arguments,
    jit_static_arguments,
    open_views,
    static_arguments,
    traced_options,
    with_constants,
)
from jaxprtool.jaxcompat.lowering import (
    exported_names,
    hlo_text,
    lowering_function,
    module_under_axes,
    partition_module,
    portable_artifact,
    rename_module,
    source_paths_without,
    traced_jaxpr,
    traced_lowering,
    xla_computation,
)
from jaxprtool.jaxcompat.mapped_rules import (
    jvp_result_dims,
    mapped_jvp_params,
    mapped_vjp_params,
    vjp_result_dims,
)
from jaxprtool.jaxcompat.mapping import (
    TracedElement,
    assembled,
    check_refs,
    evaluated,
    is_element,
    is_vmappable,
    mapped_mesh_axes,
    spmd_axis_names,
    vmappable_specs,
)
from jaxprtool.jaxcompat.marked_calls import (
    CONVERTED,
    equation_for_jax,
    for_jax,
    from_jax,
    jaxpr_as_fun,
)
from jaxprtool.jaxcompat.marks import Mark, convolves, mark_of, marked, marked_name
from jaxprtool.jaxcompat.opaque import (
    OpaqueDType,
    OpaqueMemory,
    OpaquePrimitive,
    defining_module,
    effect_texts,
    effects_of,
    is_opaque,
    opaque_primitive,
    raised_by_pallas,
)
from jaxprtool.jaxcompat.printing import (
    add_printing_rule,
    is_unspecified,
    print_with_rule,
    printed_jaxprs,
    printing_rule,
)
from jaxprtool.jaxcompat.profiles import pprof
from jaxprtool.jaxcompat.retyped_rules import closes_over_sizes, retyped_rules
from jaxprtool.jaxcompat.roofline import roofline_flops
from jaxprtool.jaxcompat.running import (
    callback_failures,
    compiles_draws_slowly,
    default_tolerance,
    failure_to_start,
    failures_to_start,
    fuses_sines_and_pads,
    has_backends,
    has_checks,
    keep_backend_probing_quiet,
    keeps_bfloat16,
    lgamma_reads_tables,
    primitive_test_programs,
    untested_version,
)
from jaxprtool.jaxcompat.shapes import (
    DIM_AS_VALUE,
    SymbolicConstraint,
    SymbolicDimension,
    dimension_terms,
    is_symbolic_dimension,
    lacks_a_size,
    solved_symbols,
    symbolic_constraints,
)
from jaxprtool.jaxcompat.source_locations import (
    common_scope,
    hide_frames,
    in_scope,
    name_stack,
    source_infos,
    source_under,
    user_frame,
    user_frames,
)
from jaxprtool.jaxcompat.tracing import (
    bind_jit,
    default_settings,
    double_precision,
    is_staging,
    setting_of,
    trace_flat,
    trace_in_setting,
    trace_lifted,
    traced_like,
)
from jaxprtool.jaxcompat.values import (
    ABSTRACT_TOKEN,
    CONTEXT_DEFAULTS,
    EMPTY_MESH,
    HIGH_PRIMITIVES,
    UNSPECIFIED,
    AbstractRef,
    ArrayCopySemantics,
    FrozenDict,
    IndexSlice,
    KeyType,
    LinearSolveTuple,
    NDIndexer,
    array_type,
    as_literal,
    context_settings,
    equation_context,
    has_plain_layout,
    inline_as_word,
    inline_of_word,
    key_implementation,
    key_implementations,
    linear_call_transpose,
    linear_call_transpose_param,
    literal_value,
    logical_array,
    nested_type,
    physical_array,
    physical_element,
    weakly_typed,
    with_weak_type,
)
