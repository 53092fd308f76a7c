"""Devices and interconnects, and roofline bounds of times on them.

A device has one rate for matrix products of each dtype, one for everything else on its vector
units, and one memory bandwidth. What may run on any unit, such as a kernel, has the highest rate.
At best, the units and the memory work at the same time, so the longest of their times is a lower
bound of the time, and the bottleneck. (S. Williams, A. Waterman and D. Patterson, "Roofline: an
insightful visual performance model", 2009.)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.documents import bytes_of

# --- devices --------------------------------------------------------------------------------------
# Devices, and a roofline model: a lower bound of a program's time on a device.

#: The name, in place of a precision, of FLOPs that any unit of a device may compute.
ANY_UNIT = "any unit"

#: TFLOP/s, or GB/s.
_TERA, _GIGA = 1e12, 1e9

#: Types that a device may compute in any wider one.
_NARROW = ("bool", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")


class Counted(Protocol):
    """Equations whose FLOPs and bytes are known.

    Attributes:
        work: Their work: `flops`, `transcendentals` and `bytes`.
        products: The FLOPs of matrix products among it, by precision.
    """

    @property
    def work(self) -> Any: ...
    @property
    def products(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class DeviceSpec:
    """The peak rates of a device.

    Attributes:
        name: The name of the device.
        products: FLOP/s of matrix products, by precision: `bf16`; `f32 highest` for full `f32`,
            where JAX's default is less precise. Others run at the rate `vector`.
        vector: FLOP/s of everything else.
        bandwidth: Memory bandwidth, in bytes a second.
        source: Where the figures are from.
        vmem: The bytes of the vector memory of a TPU's core; None for other devices.
        kernel_vmem: How much of it a kernel may use by default.
        shared: The bytes of shared memory that a block of threads of a GPU may use.
    """

    name: str
    products: Mapping[str, float]
    vector: float
    bandwidth: float
    source: str = ""
    vmem: int | None = None
    kernel_vmem: int | None = None
    shared: int | None = None

    def bound(self, group: Counted) -> Bound:
        """Return a lower bound of the time of a group."""
        of_products = sum(group.products.values())
        rest = group.work.flops + group.work.transcendentals - of_products
        products = sum(flops / self.rate(name) for name, flops in group.products.items())
        compute = max(rest / self.vector, products)
        memory = group.work.bytes / self.bandwidth
        return Bound(max(compute, memory), "compute" if compute >= memory else "memory")

    def rate(self, product: str) -> float:
        """Return the FLOP/s of matrix products of a precision, as in `Counted.products`.

        The rate of `ANY_UNIT`, and of narrow types that are not listed, is the highest.
        """
        plain = product.removesuffix(" highest")
        if rate := self.products.get(product) or self.products.get(plain):
            return rate
        is_any = product == ANY_UNIT or plain.partition("_")[0] in _NARROW
        return self.highest if is_any else self.vector

    @property
    def highest(self) -> float:
        """The highest of its rates, in FLOP/s."""
        return max([self.vector, *self.products.values()])

    def utilization(self, group: Counted, seconds: float) -> float:
        """Return the model FLOPs utilization: the time of the products at peak rates by `seconds`.

        Args:
            group: The cost of the program.
            seconds: The measured time.
        """
        products = (product for product in group.products.items() if product[0] != ANY_UNIT)
        return sum(flops / self.rate(name) for name, flops in products) / seconds


@dataclass(frozen=True)
class Bound:
    """A lower bound of a time.

    Attributes:
        seconds: The bound.
        limit: The bottleneck: "compute" or "memory".
    """

    seconds: float
    limit: str


def _nvidia(
    name: str,
    bf16: float,
    tf32: float,
    f32: float,
    f64: float,
    narrow: float,
    gigabytes: float,
    shared: int,
    source: str,
) -> DeviceSpec:
    """Return a GPU. JAX's default precision for products of f32 is TF32 on it.

    The KiB of shared memory are those of its compute capability in the CUDA Programming Guide.
    """
    products = {"bf16": bf16, "f16": bf16, "f32": tf32, "f32 highest": f32, "f64": f64}
    products |= dict.fromkeys(("i8", "u8"), narrow)
    rates = {key: value * _TERA for key, value in products.items()}
    memory = gigabytes * _GIGA
    return DeviceSpec(name, rates, f32 * _TERA, memory, source, shared=shared << 10)


def _tpu(
    name: str,
    bf16: float,
    int8: float,
    gigabytes: float,
    vector: float,
    mebibytes: tuple[int, int],
    source: str,
) -> DeviceSpec:
    """Return a TPU. The mebibytes are those of a core's vector memory, and a kernel's limit.

    A product of f32 costs as much as one of bf16 by default, and as much as six at the highest
    precision.

    No figure is published for the vector units. Four operations in each of the 8 x 128 lanes of a
    core are assumed, at the clock that the bf16 rate implies: 1.5 GHz on v5e, 1.75 GHz on v5p. For
    v6e, a fortieth of the bf16 rate is assumed.
    """
    products = {
        "bf16": bf16,
        "f16": bf16,
        "f32": bf16,
        "f32 highest": bf16 / 6,
        "i8": int8,
        "u8": int8,
    }
    rates = {key: value * _TERA for key, value in products.items()}
    vmem, limit = (size << 20 for size in mebibytes)
    return DeviceSpec(name, rates, vector * _TERA, gigabytes * _GIGA, source, vmem, limit)


def _with_fp8(device: DeviceSpec, teraflops: float) -> DeviceSpec:
    rates = dict.fromkeys(("f8_e4m3fn", "f8_e5m2"), teraflops * _TERA)
    return replace(device, products={**device.products, **rates})


#: Dense rates, without sparsity.
DEVICES: dict[str, DeviceSpec] = {
    device.name: device
    for device in (
        _with_fp8(
            _nvidia(
                "h200", 989.4, 494.7, 66.9, 66.9, 1978.9, 4800, 227, "NVIDIA H200 datasheet, SXM"
            ),
            1978.9,
        ),
        _with_fp8(
            _nvidia(
                "h100", 989.4, 494.7, 66.9, 66.9, 1978.9, 3350, 227, "NVIDIA H100 datasheet, SXM"
            ),
            1978.9,
        ),
        _nvidia("a100", 312, 156, 19.5, 19.5, 624, 2039, 163, "NVIDIA A100 datasheet, SXM, 80 GB"),
        _with_fp8(_nvidia("l4", 121, 60, 30.3, 0.47, 242.5, 300, 99, "NVIDIA L4 datasheet"), 242.5),
        _tpu("tpu-v5e", 197, 394, 819, 6.1, (128, 16), "Google Cloud documentation, TPU v5e"),
        _tpu("tpu-v5p", 459, 918, 2765, 14.3, (64, 16), "Google Cloud documentation, TPU v5p"),
        _tpu("tpu-v6e", 918, 1836, 1640, 23, (128, 32), "Google Cloud documentation, TPU v6e"),
        DeviceSpec(
            "m3",
            {},
            3.5 * _TERA,
            100 * _GIGA,
            "Apple's figure of the memory; 10 GPU cores of 128 lanes at 1.4 GHz, by measurement",
        ),
    )
}


def device_of_kind(kind: str) -> DeviceSpec | None:
    """Return the device of a kind, as JAX names it: `NVIDIA H100 80GB HBM3`. None if unknown."""
    words = kind.lower().replace("-", " ").split()
    for part, name in _KINDS.items():
        if set(part.split()) <= set(words):
            return DEVICES[name]
    return None


#: The devices by words of their kind, as JAX names it. The first match counts.
_KINDS = {
    "h200": "h200",
    "h100": "h100",
    "a100": "a100",
    "l4": "l4",
    "tpu v5 lite": "tpu-v5e",
    "tpu v5e": "tpu-v5e",
    "tpu v5p": "tpu-v5p",
    "tpu v5": "tpu-v5p",
    "tpu v6 lite": "tpu-v6e",
    "tpu v6e": "tpu-v6e",
}


def device_named(name: str) -> DeviceSpec:
    """Return a device by its name, or read one from a file of figures, `FILE.toml`.

    Raises:
        ArgumentsError: If no device has the name, or the file cannot be read or lacks a figure.
    """
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".toml"):
        names = ", ".join(DEVICES)
        raise ArgumentsError(
            f"unknown device '{name}'",
            did_you_mean(name, DEVICES) or f"available: {names}; or a file of figures, FILE.toml",
        )
    try:
        with open(name, "rb") as file:
            return _read(name, tomllib.load(file))
    except OSError as error:
        raise ArgumentsError(f"cannot read {name}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentsError(f"{name} is not valid TOML: {error}") from None


_EXAMPLE = (
    "write vector = 40e12, bandwidth = 2e12, products = {bf16 = 600e12}, in FLOP/s and bytes per "
    "second"
)


def _read(path: str, figures: dict[str, Any]) -> DeviceSpec:
    allowed = ("name", "products", "vector", "bandwidth", "source")
    for key in figures:
        if key not in allowed:
            raise ArgumentsError(f"{path}: unknown figure '{key}'", did_you_mean(key, allowed))
    products = figures.get("products", {})
    if not isinstance(products, dict):
        raise ArgumentsError(f"{path}: products must be FLOP/s by dtype", _EXAMPLE)
    numbers = {"vector": figures.get("vector"), "bandwidth": figures.get("bandwidth")}
    for key, value in {**numbers, **{f"products.{k}": v for k, v in products.items()}}.items():
        if value is None:
            raise ArgumentsError(f"{path} lacks the figure '{key}'", _EXAMPLE)
        if type(value) not in (int, float) or not value > 0:
            raise ArgumentsError(f"{path}: {key} = {value!r} is not a positive number", _EXAMPLE)
    return DeviceSpec(
        str(figures.get("name", path)),
        products,
        figures["vector"],
        figures["bandwidth"],
        str(figures.get("source", "")),
    )


# --- interconnects --------------------------------------------------------------------------------
# Interconnects, and lower bounds of the times of collectives on them.
#
# The bounds count the bytes that a device sends with the algorithm that sends the least: a ring for
# most kinds. They do not include latencies. They hold if devices reduce the values that they
# receive; a switch that reduces, such as NVLink SHARP, can take less time for an all-reduce. (R.
# Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
# MPICH", 2005; "bus bandwidth" in doc/PERFORMANCE.md of NVIDIA's nccl-tests.)

#: GB/s.
_GIGABYTES = 1e9


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
            kind: The kind, as in `ir.hlo.partitions.KINDS`.
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
        kind: The kind, as in `ir.hlo.partitions.KINDS`.
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
    return Interconnect(name, gigabytes / 2 * _GIGABYTES, source)


def _ici(name: str, gigabytes: float, page: str) -> Interconnect:
    """Return the links between the chips of a TPU."""
    source = f"Google Cloud documentation, TPU {page}, ICI of a chip"
    return _of_both_directions(name, gigabytes, source)


#: Peak rates. Those of TPU v5e and v6e agree with the bisection bandwidth of a pod on their pages,
#: which is that of 32 links of 16 x 16 chips. The page of TPU v4 states no bandwidth of a chip; the
#: bisection bandwidth of a pod, that of 512 links of 16 x 16 x 16 chips, gives 47 GB/s for a link.
INTERCONNECTS: dict[str, Interconnect] = {
    interconnect.name: interconnect
    for interconnect in (
        _of_both_directions("nvlink3", 600, "NVIDIA's page of NVLink, A100, 12 links"),
        _of_both_directions("nvlink4", 900, "NVIDIA's page of NVLink, H100, 18 links"),
        _of_both_directions("nvlink5", 1800, "NVIDIA's page of NVLink, Blackwell, 18 links"),
        Interconnect("pcie4", 32 * _GIGABYTES, "PCI Express 4.0, 16 lanes of 16 GT/s"),
        Interconnect("pcie5", 64 * _GIGABYTES, "PCI Express 5.0, 16 lanes of 32 GT/s"),
        Interconnect("ethernet-100", 12.5 * _GIGABYTES, "100 Gbit/s for each device"),
        Interconnect("ethernet-400", 50 * _GIGABYTES, "400 Gbit/s for each device"),
        Interconnect(
            "tpu-v4", 300 * _GIGABYTES, "N. Jouppi et al., TPU v4, ISCA 2023: 6 links of 50 GB/s"
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
        names = ", ".join(INTERCONNECTS)
        raise ArgumentsError(
            f"unknown interconnect '{text}'",
            did_you_mean(text, INTERCONNECTS) or f"available: {names}; or a figure, 300GB/s",
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
