"""Devices, and a roofline model: a lower bound of a program's time on a device.

A device has one rate for matrix products of each dtype, one for everything else on its vector
units, and one memory bandwidth. What may run on any unit, such as a kernel, has the highest rate.
At best, computation and memory traffic overlap, so the longer of the two is a lower bound of the
time, and the bottleneck. (S. Williams, A. Waterman and D. Patterson, "Roofline:
an insightful visual performance model", 2009.)
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from jaxprtool.analysis.cost import Cost, Group
from jaxprtool.analysis.cost.rules import ANY_UNIT
from jaxprtool.errors import ArgumentsError, did_you_mean

#: TFLOP/s, or GB/s.
_TERA, _GIGA = 1e12, 1e9

#: Types that a device may compute in any wider one.
_NARROW = ("bool", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")


@dataclass(frozen=True)
class Device:
    """The peak rates of a device.

    Attributes:
        name: The name of the device.
        products: FLOP/s of matrix products, by precision: `bf16`; `f32 highest` for full `f32`,
            where JAX's default is less precise. Others run at the rate `vector`.
        vector: FLOP/s of everything else.
        bandwidth: Memory bandwidth, in bytes a second.
        source: Where the figures are from.
    """

    name: str
    products: Mapping[str, float]
    vector: float
    bandwidth: float
    source: str = ""

    def bound(self, group: Group) -> Bound:
        """Return a lower bound of the time of a group."""
        of_products = sum(group.products.values())
        rest = group.work.flops + group.work.transcendentals - of_products
        compute = rest / self.vector
        for name, flops in group.products.items():
            compute += flops / self.rate(name)
        memory = group.work.bytes / self.bandwidth
        return Bound(max(compute, memory), "compute" if compute >= memory else "memory")

    def rate(self, product: str) -> float:
        """Return the FLOP/s of matrix products of a precision, as in `Group.products`.

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

    def utilization(self, group: Group, seconds: float) -> float:
        """Return the model FLOPs utilization: the time of the products at peak rates by `seconds`.

        Args:
            group: The cost of the program.
            seconds: The measured time.
        """
        products = (each for each in group.products.items() if each[0] != ANY_UNIT)
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


def timed(found: Any, device: Device) -> Any:
    """Return a dataclass with the times on a device of all groups of equations in it."""
    if isinstance(found, Group):
        bound = device.bound(found)
        return replace(found, seconds=bound.seconds, limit=bound.limit)
    if type(found) is tuple:
        return tuple(timed(each, device) for each in found)
    if is_dataclass(found) and not isinstance(found, type):
        inner = {each.name: timed(getattr(found, each.name), device) for each in fields(found)}
        return replace(found, **inner)
    return found


def with_times(found: Cost, device: Device | None, seconds: float | None) -> Cost:
    """Return a cost with the time of the program, and the times of its groups on a device."""
    if device is None:
        return replace(found, seconds=seconds)
    part = None if seconds is None else device.utilization(found.total, seconds)
    # Collectives have no time: the rates of links are not known.
    on_device = replace(timed(found, device), collectives=found.collectives)
    return replace(on_device, seconds=seconds, utilization=part)


def _nvidia(
    name: str,
    bf16: float,
    tf32: float,
    f32: float,
    f64: float,
    narrow: float,
    gigabytes: float,
    source: str,
) -> Device:
    """Return a GPU. JAX's default precision for products of f32 is TF32 on it."""
    products = {"bf16": bf16, "f16": bf16, "f32": tf32, "f32 highest": f32, "f64": f64}
    products |= dict.fromkeys(("i8", "u8"), narrow)
    rates = {key: value * _TERA for key, value in products.items()}
    return Device(name, rates, f32 * _TERA, gigabytes * _GIGA, source)


def _tpu(name: str, bf16: float, int8: float, gigabytes: float, source: str) -> Device:
    """Return a TPU.

    A product of f32 costs as much as one of bf16 by default, and as much as six at the highest
    precision.

    No figure is published for the vector units; a fortieth of the bf16 rate is assumed.
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
    return Device(name, rates, bf16 / 40 * _TERA, gigabytes * _GIGA, source)


def _with_fp8(device: Device, teraflops: float) -> Device:
    rates = dict.fromkeys(("f8_e4m3fn", "f8_e5m2"), teraflops * _TERA)
    return Device(
        device.name, {**device.products, **rates}, device.vector, device.bandwidth, device.source
    )


#: Dense rates, without sparsity.
DEVICES: dict[str, Device] = {
    each.name: each
    for each in (
        _with_fp8(
            _nvidia("h200", 989.4, 494.7, 66.9, 66.9, 1978.9, 4800, "NVIDIA H200 datasheet, SXM"),
            1978.9,
        ),
        _with_fp8(
            _nvidia("h100", 989.4, 494.7, 66.9, 66.9, 1978.9, 3350, "NVIDIA H100 datasheet, SXM"),
            1978.9,
        ),
        _nvidia("a100", 312, 156, 19.5, 19.5, 624, 2039, "NVIDIA A100 datasheet, SXM, 80 GB"),
        _with_fp8(_nvidia("l4", 121, 60, 30.3, 0.47, 242.5, 300, "NVIDIA L4 datasheet"), 242.5),
        _tpu("tpu-v5e", 197, 394, 819, "Google Cloud documentation, TPU v5e"),
        _tpu("tpu-v5p", 459, 918, 2765, "Google Cloud documentation, TPU v5p"),
        _tpu("tpu-v6e", 918, 1836, 1640, "Google Cloud documentation, TPU v6e"),
        Device(
            "m3",
            {},
            3.5 * _TERA,
            100 * _GIGA,
            "Apple's figure of the memory; 10 GPU cores of 128 lanes at 1.4 GHz, by measurement",
        ),
    )
}


def device_of_kind(kind: str) -> Device | None:
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


def device_named(name: str) -> Device:
    """Return a device by its name, or read one from a file of figures, `FILE.toml`.

    Raises:
        ArgumentsError: If no device has the name, or the file cannot be read or lacks a figure.
    """
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".toml"):
        known = ", ".join(DEVICES)
        raise ArgumentsError(
            f"unknown device '{name}'",
            did_you_mean(name, DEVICES) or f"available: {known}; or a file of figures, FILE.toml",
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


def _read(path: str, figures: dict[str, Any]) -> Device:
    known = ("name", "products", "vector", "bandwidth", "source")
    for key in figures:
        if key not in known:
            raise ArgumentsError(f"{path}: unknown figure '{key}'", did_you_mean(key, known))
    products = figures.get("products", {})
    if not isinstance(products, dict):
        raise ArgumentsError(f"{path}: products must be FLOP/s by dtype", _EXAMPLE)
    numbers = {"vector": figures.get("vector"), "bandwidth": figures.get("bandwidth")}
    for key, value in {**numbers, **{f"products.{k}": v for k, v in products.items()}}.items():
        if value is None:
            raise ArgumentsError(f"{path} lacks the figure '{key}'", _EXAMPLE)
        if type(value) not in (int, float) or not value > 0:
            raise ArgumentsError(f"{path}: {key} = {value!r} is not a positive number", _EXAMPLE)
    return Device(
        str(figures.get("name", path)),
        products,
        figures["vector"],
        figures["bandwidth"],
        str(figures.get("source", "")),
    )
