"""`jaxprtool backends`: what a program can run on here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.cli import options, output
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax

if TYPE_CHECKING:
    from jaxprtool.render.documents.passes import BackendsDocument


@options.command
def backends(json: options.Json = False, *, told: Told) -> None:
    """List the backends and devices of this machine.

    [bold]Example[/]

      jaxprtool backends
    """
    start_jax(told)
    told("looking for devices")
    from jaxprtool.execute.backends import backends as find_backends

    found = find_backends()
    if json:
        document: BackendsDocument = {
            "backends": [
                {
                    "platform": b.platform,
                    "version": b.version,
                    "default": b.default,
                    "devices": [{"id": d.id, "kind": d.device_kind} for d in b.devices],
                }
                for b in found
            ]
        }
        output.write_json(document)
        return
    rows = [
        (b.platform + (" (default)" if b.default else ""), str(len(b.devices)), b.kinds, b.version)
        for b in found
    ]
    output.write_table(("backend", "devices", "kind", "version"), rows, right=("devices",))
