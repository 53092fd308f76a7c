"""What the parts of a sweep found, added up.

pytest -m sweep tests/passes/test_rewriting_proof.py --junitxml=sweep.xml
python -m tests.programs.totals sweep.xml
"""

from __future__ import annotations

import ast
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter


def totals(path: str) -> dict[str, Counter[str]]:
    """The outcomes that tests of each file have recorded, and how many tests there were."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        counts = found.setdefault(case.get("classname", ""), Counter())
        failed = case.find("failure") is not None or case.find("error") is not None
        counts["tests failed" if failed else "tests passed"] += 1
        for each in case.iter("property"):
            if each.get("name") == "outcomes":
                counts.update(ast.literal_eval(each.get("value", "{}")))
    return found


if __name__ == "__main__":
    for file, counts in totals(sys.argv[1]).items():
        print(file)
        for outcome, count in sorted(counts.items()):
            print(f"    {count:7} {outcome}")
