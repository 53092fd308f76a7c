"""Dataclasses become JSON documents with the declared keys."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import pytest

from jaxprtool.ir.documents import as_json, document


class Work(NamedTuple):
    flops: object
    bytes: int


@document(
    without=("frame",),
    names={"program": "name", "is_small": "small"},
    also=("is_small", "version"),
    flat=("work",),
    optional=("library", "rest"),
)
@dataclass(frozen=True)
class Found:
    program: str
    work: Work
    path: tuple[str, ...] = ()
    library: str = ""
    rest: tuple[str, ...] | None = None
    frame: object = object()
    version: ClassVar[int] = 1

    @property
    def is_small(self):
        return self.work.bytes < 8


@dataclass(frozen=True)
class More(Found):
    more: int | None = None


def test_a_dataclass_has_the_declared_keys():
    document = {"name": "f", "flops": 2, "bytes": 4, "path": [], "small": True, "version": 1}
    assert as_json(Found("f", Work(2, 4))) == document
    some = Found("f", Work(2, 4), library="flax", rest=())
    assert as_json(some) == {**document, "library": "flax", "rest": []}


def test_a_subclass_has_the_keys_of_its_base_and_its_own():
    assert as_json([More("f", Work(0, 9), ("scan",), more=None)]) == [
        {
            "name": "f",
            "flops": 0,
            "bytes": 9,
            "path": ["scan"],
            "more": None,
            "small": False,
            "version": 1,
        }
    ]


def test_keys_may_be_strings_and_symbolic_numbers():
    (n,) = jax.export.symbolic_shape("n")
    assert as_json(MappingProxyType({-1: Work(2 * n, 3)})) == {"-1": {"flops": "2*n", "bytes": 3}}


@pytest.mark.parametrize("value", [np.int64(1), np.zeros(2), object(), {1}])
def test_values_without_json_are_refused(value):
    with pytest.raises(TypeError, match="cannot convert"):
        as_json({"value": value})
