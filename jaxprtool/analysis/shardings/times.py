"""Lower bounds of the times of the collectives and the products of a partitioned program.

found = timed(shardings, interconnect, device)
found.collectives[0].seconds, found.compute_seconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxprtool.analysis.cost.devices import Device
from jaxprtool.analysis.cost.interconnects import Interconnect
from jaxprtool.analysis.shardings import Collective, Shardings

#: The names of `Device.products` for element types that XLA names otherwise.
_NAMES = {"s8": "i8", "f8e4m3fn": "f8_e4m3fn", "f8e5m2": "f8_e5m2"}


def timed(found: Shardings, link: Interconnect | None, device: Device | None) -> Shardings:
    """Return sharding facts with times.

    Args:
        found: The facts.
        link: The interconnect of the devices; without it, collectives have no time.
        device: The device; without it, products have no time.
    """
    compute = None if device is None else _seconds(found.products, device)
    collectives = tuple(_timed(each, link, device) for each in found.collectives)
    return replace(found, compute_seconds=compute, collectives=collectives)


def _timed(found: Collective, link: Interconnect | None, device: Device | None) -> Collective:
    if link is None:
        return found
    once = link.seconds(found.kind, found.bytes, found.devices)
    if once is None:
        return found
    runs = 1 if found.count is None else found.count
    if device is None:
        return replace(found, seconds=once * runs)
    hidden = min(once, _seconds(found.overlapping, device))
    return replace(found, seconds=once * runs, overlap_seconds=hidden * runs)


def _seconds(products: Mapping[str, int], device: Device) -> float:
    """Return a lower bound of the time of matrix products on a device."""
    return sum(flops / device.rate(_NAMES.get(name, name)) for name, flops in products.items())
