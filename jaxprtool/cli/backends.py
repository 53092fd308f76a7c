"""`jaxprtool backends`: the backends and devices of this machine."""

from __future__ import annotations

from jaxprtool.cli import options, output
from jaxprtool.cli.progress import OnProgress
from jaxprtool.cli.session import command
from jaxprtool.cli.start import start_jax


@command
def backends(json: options.Json = False, *, on_progress: OnProgress) -> None:
    """List the backends and devices of this machine.

    [bold]Example[/]

      jaxprtool backends
    """
    start_jax(on_progress)
    on_progress("looking for devices")
    from jaxprtool.execute.running.backends import backends as find_backends

    found = find_backends()
    if json:
        from jaxprtool.render.documents.passes import Backend, BackendsDocument, Device

        documents = []
        for b in found:
            devices = [Device(d.id, d.device_kind) for d in b.devices]
            documents.append(Backend(b.platform, b.version, b.default, devices))
        output.write_json(BackendsDocument(documents))
        return
    rows = [
        (b.platform + (" (default)" if b.default else ""), str(len(b.devices)), b.kinds, b.version)
        for b in found
    ]
    output.write_table(("backend", "devices", "kind", "version"), rows, right=("devices",))
