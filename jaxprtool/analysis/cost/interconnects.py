"""Interconnects, and lower bounds of the times of collectives on them.

The bounds count the bytes that a device sends with the algorithm that sends the least: a ring for
most kinds. They do not include latencies. They hold if devices reduce the values that they receive;
a switch that reduces, such as NVLink SHARP, can take less time for an all-reduce. (R. Thakur, R.
Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
"bus bandwidth" in doc/PERFORMANCE.md of NVIDIA's nccl-tests.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.basics.quantities import bytes_of

#: GB/s.
_GIGA = 1e9


@dataclass(frozen=True)
class Interconnect:
    """The links over which devices exchange values.

    Attributes:
        name: The name of the interconnect.
        bandwidth: The bytes a second that one device can send over all its links together, in one
            direction.
        source: Where the figure is from.
    """

    name: str
    bandwidth: float
    source: str = ""

    def seconds(self, kind: str, result_bytes: int, devices: int) -> float | None:
        """Return a lower bound of the time of a collective.

        On a torus, devices along one axis of a mesh may be connected only by the links of one axis
        of the torus. Then the bound is too low, since it counts all links.

        Args:
            kind: The kind, as in `ir.hlo.collectives.KINDS`.
            result_bytes: The bytes of its result on one device.
            devices: The number of devices in a group.

        Returns:
            The seconds, or None if the sizes are known only when the collective runs.
        """
        sent = bytes_sent(kind, result_bytes, devices)
        return None if sent is None else sent / self.bandwidth


def bytes_sent(kind: str, result_bytes: int, devices: int) -> float | None:
    """Return a lower bound of the bytes that the busiest device of a group sends in a collective.

    Args:
        kind: The kind, as in `ir.hlo.collectives.KINDS`.
        result_bytes: The bytes of its result on one device.
        devices: The number of devices in a group.

    Returns:
        The bytes. None for `ragged-all-to-all`: its sizes are values, and its result is a buffer
        that they may leave almost empty.
    """
    rule = _SENT[kind]
    if rule is None:
        return None
    return rule(devices) * result_bytes if devices > 1 else 0.0


#: The bytes that a device of a group of n sends, divided by those of its result. In a
#: reduce-scatter the operand has the size of n results.
_SENT: dict[str, Callable[[int], float] | None] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": None,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}


def _of_both_directions(name: str, gigabytes: float, source: str) -> Interconnect:
    """Return an interconnect whose published figure is the sum of both directions."""
    source += f": {gigabytes:,} GB/s in both directions"
    return Interconnect(name, gigabytes / 2 * _GIGA, source)


def _ici(name: str, gigabytes: float, page: str) -> Interconnect:
    """Return the links between the chips of a TPU."""
    source = f"Google Cloud documentation, TPU {page}, ICI of a chip"
    return _of_both_directions(name, gigabytes, source)


#: Peak rates. Those of TPU v5e and v6e agree with the bisection bandwidth of a pod on their pages,
#: which is that of 32 links of 16 x 16 chips. The page of TPU v4 states no bandwidth of a chip; the
#: bisection bandwidth of a pod, that of 512 links of 16 x 16 x 16 chips, gives 47 GB/s for a link.
INTERCONNECTS: dict[str, Interconnect] = {
    each.name: each
    for each in (
        _of_both_directions("nvlink3", 600, "NVIDIA's page of NVLink, A100, 12 links"),
        _of_both_directions("nvlink4", 900, "NVIDIA's page of NVLink, H100, 18 links"),
        _of_both_directions("nvlink5", 1800, "NVIDIA's page of NVLink, Blackwell, 18 links"),
        Interconnect("pcie4", 32 * _GIGA, "PCI Express 4.0, 16 lanes of 16 GT/s"),
        Interconnect("pcie5", 64 * _GIGA, "PCI Express 5.0, 16 lanes of 32 GT/s"),
        Interconnect("ethernet-100", 12.5 * _GIGA, "100 Gbit/s for each device"),
        Interconnect("ethernet-400", 50 * _GIGA, "400 Gbit/s for each device"),
        Interconnect(
            "tpu-v4", 300 * _GIGA, "N. Jouppi et al., TPU v4, ISCA 2023: 6 links of 50 GB/s"
        ),
        _ici("tpu-v5e", 400, "v5e"),
        _ici("tpu-v5p", 1200, "v5p"),
        _ici("tpu-v6e", 800, "v6e"),
    )
}

#: The end of a figure in bits: `400Gbps`, `400 Gbit/s`, or `400Gb/s`, which some write for bytes.
_BITS = re.compile(r"(b|[Bb]its?)(ps|/s)?$")

#: The "per second" at the end of a figure in bytes: `300GB/s`, `300GBps`.
_SECOND = re.compile(r"/s$|(?<=B)ps$")

_FIGURES = "write bytes a second in one direction, such as 300GB/s, 50GiB/s or 1e11"


def interconnect_named(text: str) -> Interconnect:
    """Return an interconnect by its name, or one with a bandwidth: `300GB/s`, `50GiB/s`, `1e11`.

    Raises:
        ArgumentsError: If no interconnect has the name, or the figure is not in bytes a second.
    """
    text = text.strip()
    if text in INTERCONNECTS:
        return INTERCONNECTS[text]
    if not text[:1].isdigit():
        known = ", ".join(INTERCONNECTS)
        raise ArgumentsError(
            f"unknown interconnect '{text}'",
            did_you_mean(text, INTERCONNECTS) or f"available: {known}; or a figure, 300GB/s",
        )
    if _BITS.search(text):
        raise ArgumentsError(f"'{text}' is a figure in bits", _FIGURES)
    try:
        bandwidth = bytes_of(_SECOND.sub("", text))
    except ArgumentsError:
        raise ArgumentsError(f"'{text}' is not a bandwidth", _FIGURES) from None
    if not bandwidth:
        raise ArgumentsError(f"the bandwidth '{text}' is not positive", _FIGURES)
    return Interconnect(text, bandwidth)
