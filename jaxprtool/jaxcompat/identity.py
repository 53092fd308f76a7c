"""What an object is known by as long as it lives, told fast."""

from __future__ import annotations

from collections.abc import Callable

#: Returns a number that no other living object has, as `id` does. From Python 3.12 on, `id` tells
#: audit hooks of each call, and JAX imports filelock where it is installed, which has such a hook:
#: then a call of `id` takes ten times as long, which is felt where each operand is looked up by it.
identity: Callable[[object], int] = object.__hash__
