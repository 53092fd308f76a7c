"""Documents of passes, primitives and backends, independent of any program."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from jaxprtool.ir.documents import document


class PassSummary(NamedTuple):
    """A pass in the list."""

    name: Annotated[str, "Its name in a pipeline."]
    help: Annotated[str, "A one-line description."]
    group: Annotated[str, "Its group: `clean up`; empty if none."]
    origin: Annotated[str, "The package, module or file that defines it."]


class PassesDocument(NamedTuple):
    """`passes`."""

    passes: Annotated[list[PassSummary], "The passes, by name."]
    pipelines: Annotated[dict[str, str], "The named pipelines: the passes of each, as text."]


class Option(NamedTuple):
    """An option of a pass."""

    name: Annotated[str, "Its name."]
    type: Annotated[str, "Its type, as in the source."]
    default: Annotated[str | None, "Its default, as text; null if it is required."]
    help: Annotated[str, "Its description; empty if there is none."]


class RewriteRule(NamedTuple):
    """A rule of a pass."""

    pattern: Annotated[str, "The equations that it matches."]
    replacement: Annotated[str, "The equation that replaces them."]
    condition: Annotated[str, "The condition under which it applies."]
    exact: Annotated[str, "`exact` if it preserves every bit of a result; else when it is applied."]
    family: Annotated[str, "The family of rules that it belongs to; empty if none."]


class Section(NamedTuple):
    """A section of the help of a pass."""

    title: Annotated[str, "Its title: `Example`, `Note`, …."]
    text: Annotated[str, "Its text."]


@document(optional=("rules",))
class PassDocument(NamedTuple):
    """`explain` of a pass."""

    name: Annotated[str, "The name of the pass."]
    text: Annotated[str, "A description."]
    group: Annotated[str, "Its group: `clean up`; empty if none."]
    origin: Annotated[str, "The package, module or file that defines it."]
    pipelines: Annotated[list[str], "The named pipelines that contain it: `-O1`."]
    options: Annotated[list[Option], "Its options."]
    refuses: Annotated[list[str], "The errors that it raises."]
    sections: Annotated[list[Section], "The other sections of its help: an example, notes."]
    rules: Annotated[list[RewriteRule] | None, "Its rules, if it has any."] = None


class Trait(NamedTuple):
    """A trait of a primitive that differs from the default."""

    name: Annotated[str, "The trait."]
    value: Annotated[str, "Its value, as Python source."]
    text: Annotated[str, "The meaning of the trait."]


class PrimitiveDocument(NamedTuple):
    """`explain` of a primitive."""

    name: Annotated[str, "The name of the primitive."]
    text: Annotated[str, "A description of the primitive."]
    traits: Annotated[list[Trait], "The traits of the primitive that differ from the defaults."]
    tables: Annotated[
        list[str], "The tables that have a rule for it: `batch`, `dce`, `python`, `unzip`, …."
    ]
    rules: Annotated[list[RewriteRule], "The rules of `simplify` for it."]


class PipelineStep(NamedTuple):
    """A pass of a named pipeline."""

    name: Annotated[str, "The pass, with its options."]
    when: Annotated[str, "`repeated`, or `once, at the end`."]
    help: Annotated[str, "A one-line description."]


class PipelineDocument(NamedTuple):
    """`explain` of a named pipeline."""

    name: Annotated[str, "The name of the pipeline."]
    text: Annotated[str, "A description."]
    passes: Annotated[list[PipelineStep], "Its passes, in order."]


class Device(NamedTuple):
    """A device."""

    id: Annotated[int, "Its number."]
    kind: Annotated[str, "Its model: `cpu`, `NVIDIA H100 80GB HBM3`."]
    memory: Annotated[int | None, "The bytes of memory that JAX may use; null if unknown."]


class Backend(NamedTuple):
    """A backend."""

    platform: Annotated[str, "Its name."]
    version: Annotated[str, "Its version."]
    default: Annotated[bool, "Whether it is JAX's default."]
    devices: Annotated[list[Device], "Its devices."]


class PjrtPlugin(NamedTuple):
    """A PJRT plug-in."""

    module: Annotated[str, "The module that JAX imports."]
    package: Annotated[str, "The package that it is from; empty if unknown."]
    version: Annotated[str, "The version of the package; empty if unknown."]


class BackendFailure(NamedTuple):
    """A backend or plug-in that does not start."""

    name: Annotated[str, "Its name, or the plug-in's package or module."]
    reason: Annotated[str, "The reason, in one line."]


class BackendsDocument(NamedTuple):
    """`backends`."""

    backends: Annotated[list[Backend], "The backends of this machine."]
    plugins: Annotated[list[PjrtPlugin], "The PJRT plug-ins that are installed."]
    failures: Annotated[
        list[BackendFailure], "The backends and plug-ins that are installed and do not start."
    ]
    versions: Annotated[dict[str, str], "The versions of JAX and jaxlib."]
