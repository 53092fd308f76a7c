"""`jaxprtool backends`: list the backends and devices, and those that do not start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxprtool.cli import options, output
from jaxprtool.cli.launch import start_jax
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import command

if TYPE_CHECKING:
    import jax

    from jaxprtool.execute.running.backends import Survey


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


@command
def backends_command(json: options.Json = False, *, on_progress: OnProgress) -> None:
    """List the backends and devices, and those that do not start.

    [bold]Example[/]

      jaxprtool backends
    """
    start_jax(on_progress)
    on_progress("looking for devices")
    from jaxprtool.execute.running.backends import survey
    from jaxprtool.ir.backends import platforms_hint

    available = survey()
    if json:
        output.write_json(_document(available))
        return
    if available.failures and (hint := platforms_hint()):
        output.note(hint)
    rows = [
        (
            b.platform + (" (default)" if b.default else ""),
            str(len(b.devices)),
            b.kinds,
            ", ".join(dict.fromkeys(map(_memory, b.devices))),
            b.version,
        )
        for b in available.backends
    ]
    plugins = [(p.module, p.package or "—", p.version or "—") for p in available.plugins]
    failures = [(failure.name, failure.reason) for failure in available.failures]
    tables = (
        (("backend", "devices", "kind", "memory", "version"), rows),
        (("plug-in", "package", "version"), plugins),
        (("does not start", "reason"), failures),
    )
    for number, (columns, cells) in enumerate(table for table in tables if table[1]):
        if number:
            output.write_text("")
        output.write_table(columns, cells, right=("devices",))


def _memory(device: jax.Device) -> str:
    from jaxprtool.execute.running.backends import memory_of
    from jaxprtool.ir.documents import in_bytes

    size = memory_of(device)
    return "—" if size is None else in_bytes(size)


def _document(survey: Survey) -> BackendsDocument:
    import jax
    import jaxlib

    from jaxprtool.execute.running.backends import memory_of

    backends = [
        Backend(
            b.platform,
            b.version,
            b.default,
            [Device(d.id, d.device_kind, memory_of(d)) for d in b.devices],
        )
        for b in survey.backends
    ]
    return BackendsDocument(
        backends,
        [PjrtPlugin(p.module, p.package, p.version) for p in survey.plugins],
        [BackendFailure(failure.name, failure.reason) for failure in survey.failures],
        {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
    )
