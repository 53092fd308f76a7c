"""Small parts for the tests of the sweep itself."""

import os
import time
from dataclasses import dataclass
from typing import ClassVar

from tests.sweep.parts import Part


@dataclass(frozen=True)
class Numbers:
    """The numbers from 0 to 8, in three units."""

    whole: ClassVar[bool] = False

    def units(self):
        return ["0", "3", "6"]

    def visit(self, unit, wants, visit):
        for number in range(int(unit), int(unit) + 3):
            if wants(str(number)):
                visit(str(number), number, None)


def judge(number, case):
    """Pass the even numbers. Each of the odd ones fails in its own way."""
    match number:
        case 1:
            return "refused"
        case 3:
            raise ValueError("three is wrong")
        case 5:
            os._exit(7)
        case 7:
            time.sleep(float(os.environ.get("SLEEP", 0)))
    return "even"


def parts():
    """Return the only part."""
    return [Part("numbers", Numbers(), judge)]
