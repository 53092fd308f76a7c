"""A fast `id` of objects."""

from __future__ import annotations

from collections.abc import Callable

#: Returns a number that no other living object has, like `id`. From Python 3.12 on, `id` notifies
#: audit hooks of each call, and JAX imports filelock if it is installed, which has such a hook.
#: Calls of `id` then take ten times as long, which matters for look-ups of every operand.
identity: Callable[[object], int] = object.__hash__
