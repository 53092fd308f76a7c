"""Interconnects: their figures, and the minimum time of collectives."""

from fractions import Fraction

import pytest

from jaxprtool.analysis.devices import INTERCONNECTS, Interconnect, bytes_sent, interconnect_named
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.hlo.partitions import KINDS


def ring_reduce_scatter(devices, chunk):
    """Return the bytes that each device sends in a ring reduce-scatter."""
    sent = [0] * devices
    held = [[{device} for _ in range(devices)] for device in range(devices)]
    for step in range(devices - 1):
        moves = [(device, (device - step - 1) % devices) for device in range(devices)]
        messages = [(device, part, set(held[device][part])) for device, part in moves]
        for device, part, message in messages:
            held[(device + 1) % devices][part] |= message
            sent[device] += chunk
    assert all(held[device][device] == set(range(devices)) for device in range(devices))
    return sent


def ring_all_gather(devices, chunk):
    """Return the bytes that each device sends in a ring all-gather."""
    sent = [0] * devices
    held = [{device} for device in range(devices)]
    for step in range(devices - 1):
        for device in range(devices):
            held[(device + 1) % devices].add((device - step) % devices)
            sent[device] += chunk
    assert held == [set(range(devices))] * devices
    return sent


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_bounds_equal_the_bytes_of_a_ring(devices):
    chunk = 840
    whole = devices * chunk
    scattered, gathered = ring_reduce_scatter(devices, chunk), ring_all_gather(devices, chunk)
    both = [a + b for a, b in zip(scattered, gathered, strict=True)]
    assert [bytes_sent("reduce-scatter", chunk, devices)] * devices == scattered
    assert [bytes_sent("all-gather", whole, devices)] * devices == gathered
    assert [bytes_sent("all-reduce", whole, devices)] * devices == both


def test_an_exchange_excludes_a_devices_own_part():
    assert bytes_sent("all-to-all", 800, 8) == 700


def test_a_permutation_and_a_broadcast_send_the_whole_result():
    for kind in ("collective-permute", "collective-broadcast"):
        assert bytes_sent(kind, 800, 8) == 800
        assert bytes_sent(kind, 800, 1) == 0


def test_all_kinds_have_a_bound_except_those_with_dynamic_sizes():
    assert [kind for kind in KINDS if bytes_sent(kind, 8, 2) is None] == ["ragged-all-to-all"]
    assert INTERCONNECTS["nvlink4"].seconds("ragged-all-to-all", 8, 2) is None


def test_times_are_bytes_divided_by_bandwidth():
    assert INTERCONNECTS["nvlink4"].seconds("all-reduce", 10**9, 8) == pytest.approx(1.75 / 450)
    assert INTERCONNECTS["nvlink4"].seconds("all-reduce", 10**9, 1) == 0


def test_figures_are_per_direction():
    # The number of links per device, times the bandwidth of each in GB/s.
    links = {
        "nvlink3": 12 * 25,
        "nvlink4": 18 * 25,
        "nvlink5": 18 * 50,
        "pcie4": 16 * Fraction(16, 8),
        "pcie5": 16 * Fraction(32, 8),
        "ethernet-100": Fraction(100, 8),
        "ethernet-400": Fraction(400, 8),
        "tpu-v4": 6 * 50,
        "tpu-v5e": 4 * 50,
        "tpu-v5p": 6 * 100,
        "tpu-v6e": 4 * 100,
    }
    assert {name: each.bandwidth / 10**9 for name, each in INTERCONNECTS.items()} == links


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("300GB/s", 300e9),
        (" 50GiB/s ", 50 * 2**30),
        ("1e11", 1e11),
        ("12.5 GB/s", 12.5e9),
        ("100G", 100e9),
        ("900000000/s", 9e8),
        ("800GBps", 800e9),
    ],
)
def test_a_number_is_an_interconnect(text, bandwidth):
    assert interconnect_named(text) == Interconnect(text.strip(), bandwidth)


def test_an_interconnect_can_be_named():
    assert interconnect_named("nvlink3").bandwidth == 300e9


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("nvlnk4", "unknown interconnect 'nvlnk4'", "did you mean 'nvlink4'?"),
        ("wire", "unknown interconnect 'wire'", "available: nvlink3, "),
        ("", "unknown interconnect ''", "available: "),
        ("-300GB/s", "unknown interconnect '-300GB/s'", "or a figure, 300GB/s"),
        ("400Gbps", "'400Gbps' is a figure in bits", "write bytes a second"),
        ("400 Gbit/s", "'400 Gbit/s' is a figure in bits", "write bytes a second"),
        ("400Gb/s", "'400Gb/s' is a figure in bits", "write bytes a second"),
        ("100gb", "'100gb' is a figure in bits", "write bytes a second"),
        ("300GB/h", "'300GB/h' is not a bandwidth", "write bytes a second"),
        ("300XB/s", "'300XB/s' is not a bandwidth", "write bytes a second"),
        ("0GB/s", "the bandwidth '0GB/s' is not positive", "write bytes a second"),
    ],
)
def test_invalid_interconnects_are_refused(text, message, hint):
    with pytest.raises(ArgumentsError) as caught:
        interconnect_named(text)
    assert caught.value.message == message and hint in caught.value.hint
