"""Documents of passes, primitives and backends, independent of any program."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from jaxprtool.ir.basics.documents import document


class PassSummary(NamedTuple):
    """A pass in the list."""

    name: Annotated[str, "Its name in a pipeline."]
    help: Annotated[str, "What it does, in a line."]
    group: Annotated[str, "What it is for: `clean up`; empty if it does not say."]
    origin: Annotated[str, "The package, module or file that it comes from."]


class PassesDocument(NamedTuple):
    """`passes`."""

    passes: Annotated[list[PassSummary], "The passes, by name."]
    pipelines: Annotated[dict[str, str], "The named pipelines: the passes of each, as text."]


class Option(NamedTuple):
    """An option of a pass."""

    name: Annotated[str, "Its name."]
    type: Annotated[str, "Its type, as the source spells it."]
    default: Annotated[str | None, "Its default, as text; null if it must be given."]
    help: Annotated[str, "What it means; empty if that is not said."]


class RewriteRule(NamedTuple):
    """A rule of a pass."""

    pattern: Annotated[str, "The equations that it is about."]
    replacement: Annotated[str, "What they become."]
    condition: Annotated[str, "When it holds."]
    exact: Annotated[str, "`exact` if it changes no bit of a result; else when it runs."]
    family: Annotated[str, "What it is about, as are others; empty if it does not say."]


class Section(NamedTuple):
    """A section of what a pass says of itself."""

    title: Annotated[str, "Its title: `Example`, `Note`, …."]
    text: Annotated[str, "What it says."]


@document(optional=("rules",))
class PassDocument(NamedTuple):
    """`explain` of a pass."""

    name: Annotated[str, "The name of the pass."]
    text: Annotated[str, "What it does."]
    group: Annotated[str, "What it is for: `clean up`; empty if it does not say."]
    origin: Annotated[str, "The package, module or file that it comes from."]
    pipelines: Annotated[list[str], "The named pipelines that it is a part of: `-O1`."]
    options: Annotated[list[Option], "Its options."]
    refuses: Annotated[list[str], "What it cannot do, and says."]
    sections: Annotated[list[Section], "An example, notes, and what else it says."]
    rules: Annotated[list[RewriteRule] | None, "Its rules, of a pass that works by rules."] = None


class Trait(NamedTuple):
    """What a primitive is like, where it is not as most are."""

    name: Annotated[str, "The trait."]
    value: Annotated[str, "Its value, as Python spells it."]
    text: Annotated[str, "What the trait says."]


class PrimitiveDocument(NamedTuple):
    """`explain` of a primitive."""

    name: Annotated[str, "The name of the primitive."]
    text: Annotated[str, "What this is."]
    traits: Annotated[list[Trait], "What it is like."]
    tables: Annotated[
        list[str], "The tables that have a rule for it: `batch`, `dce`, `python`, `unzip`, …."
    ]
    rules: Annotated[list[RewriteRule], "The rules of `simplify` that are about it."]


class PipelineStep(NamedTuple):
    """A pass of a named pipeline."""

    name: Annotated[str, "The pass, with its options."]
    when: Annotated[str, "`repeated`, or `once, at the end`."]
    help: Annotated[str, "What it does, in a line."]


class PipelineDocument(NamedTuple):
    """`explain` of a named pipeline."""

    name: Annotated[str, "The name of the pipeline."]
    text: Annotated[str, "What it does."]
    passes: Annotated[list[PipelineStep], "Its passes, in order."]


class Device(NamedTuple):
    """A device."""

    id: Annotated[int, "Its number."]
    kind: Annotated[str, "What it is."]


class Backend(NamedTuple):
    """A backend."""

    platform: Annotated[str, "Its name."]
    version: Annotated[str, "Its version."]
    default: Annotated[bool, "Whether it is JAX's default."]
    devices: Annotated[list[Device], "Its devices."]


class BackendsDocument(NamedTuple):
    """`backends`."""

    backends: Annotated[list[Backend], "The backends of this machine."]
