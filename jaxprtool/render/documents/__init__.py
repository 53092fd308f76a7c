"""The documents that commands print with `--json`; some are assembled here, as NamedTuples.

Most commands print their findings directly: `ir.documents` converts any dataclass to JSON.
The document of a program, which may have many equations, consists of dicts, described by the
TypedDicts here.
"""

from __future__ import annotations

import json
import os
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.documents import as_json, document
from jaxprtool.ir.source_text import UNKNOWN, Place

#: The version of the documents: another number if a key of before has gone or has changed.
SCHEMA = 2


def document_text(document: Any, most: int | None = None) -> str:
    """Return the JSON of a command's result, which has its version as `schema`.

    Args:
        document: A dataclass or a NamedTuple.
        most: The most bytes that the text and a line break may take, without spaces. If they do not
            suffice, every list of objects keeps as many of its first entries as fit, the same
            number for all, and `omitted` has the number of the others by the path of the list.

    Raises:
        ArgumentsError: If the document is longer even without any of these entries.
    """
    whole = {"schema": SCHEMA, **as_json(document)}
    if most is None:
        return json.dumps(whole, indent=2, allow_nan=False)
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False)
    if len(text) < most:
        return text
    longest = max(_lengths(whole), default=0)
    fits = bisect(range(longest), most, key=lambda count: len(_cut_text(whole, count)) + 1)
    if not fits:
        least = len(_cut_text(whole, 0)) + 1
        raise ArgumentsError(
            f"--max-bytes {most} is too small: without any entry of its lists, the document takes "
            f"{least:,} bytes"
        )
    return _cut_text(whole, fits - 1)


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of each list of objects."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _lengths(item)
    elif _is_list_of_objects(value):
        yield len(value)
        for item in value:
            yield from _lengths(item)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _cut_text(whole: dict[str, Any], count: int) -> str:
    """Return the text of a document whose lists of objects keep `count` entries."""
    omitted: Counter[str] = Counter()

    def cut(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: cut(item, f"{path}.{key}") for key, item in value.items()}
        if not _is_list_of_objects(value):
            return value
        if len(value) > count:
            omitted[path[1:]] += len(value) - count
        return [cut(item, path) for item in value[:count]]

    return json.dumps(
        {**cut(whole, ""), "omitted": omitted}, separators=(",", ":"), allow_nan=False
    )


# --- problems -------------------------------------------------------------------------------------
# The problems that `check` and `lint` find, as plain data for every format of output.

#: The severity of a problem, in the terms of SARIF and GitHub.
Level: TypeAlias = Literal["error", "warning"]


@document(names={"line": "place"}, without=("level", "annotated"))
class Problem(NamedTuple):
    """A problem that was found."""

    code: Annotated[
        str,
        "The budget or check: `flops`, `no`, `donated`, `snapshot`, a code of `lint`, or `error`.",
    ]
    line: Annotated[Place, "The user's line; null if unknown."]
    message: Annotated[str, "What is wrong, in one line."]
    details: Annotated[Sequence[str], "More lines: the parts of an amount, differences, hints."]
    annotated: Place = UNKNOWN
    level: Level = "error"

    @property
    def text(self) -> str:
        """The message and the details, as lines."""
        return "\n".join([self.message, *self.details])


class CheckedTarget(NamedTuple):
    """A target of `[tool.jaxprtool.targets]`, checked."""

    name: Annotated[str, "The name of the target in pyproject.toml."]
    target: Annotated[str, "The function or program: `train.py:step`."]
    budget: Annotated[Mapping[Any, float], "Each budget: `flops`, `peak_bytes`, …"]
    measured: Annotated[
        Mapping[Any, float], "The measured amount of each, except those that cannot be measured."
    ]
    passed: Annotated[bool, "Whether no problem was found."]
    problems: Annotated[Sequence[Problem], "The problems that were found."]


class Change(NamedTuple):
    """A change that `check --update` has written."""

    name: Annotated[str, "The name of the target."]
    key: Annotated[str, "The budget, or `snapshot`."]
    before: Annotated[str, "The value before; empty for a snapshot."]
    after: Annotated[str, "The value now, or the file of a snapshot."]


@document(optional=("updated",))
class CheckDocument(NamedTuple):
    """`check`."""

    targets: Annotated[Sequence[CheckedTarget], "The targets, the worst first."]
    updated: Annotated[Sequence[Change] | None, "With `--update`: the written changes."] = None


#: The URI of the schema of SARIF 2.1.0.
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


#: The base of relative URIs: the root of the repository.
_BASE = "%SRCROOT%"


def repository_root(folder: str) -> str:
    """Return the folder of the git repository that contains a folder, or else the folder itself."""
    above = os.path.realpath(folder)
    while not os.path.exists(os.path.join(above, ".git")):
        if above == (above := os.path.dirname(above)):
            return os.path.realpath(folder)
    return above


def github_annotations(problems: Iterable[Problem], root: str) -> str:
    """Return a command for GitHub's log for each problem, on a separate line.

    Args:
        problems: The problems.
        root: The folder that paths are relative to.
    """
    return "\n".join(_annotation(problem, root) for problem in problems)


def _annotation(problem: Problem, root: str) -> str:
    properties: dict[str, object] = {}
    if problem.annotated and (path := _relative(problem.annotated.path, root)):
        properties |= {"file": path, "line": problem.annotated.line}
    properties["title"] = f"jaxprtool {problem.code}"
    parameters = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{problem.level} {parameters}::{_escaped(problem.text)}"


def _escaped(text: str) -> str:
    """Return a text for a command of GitHub, which ends at a line break."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def sarif(
    problems: Sequence[Problem],
    version: str,
    root: str,
    about: Mapping[str, str],
    failure: str | None = None,
) -> dict[str, Any]:
    """Return problems as a log in SARIF.

    Args:
        problems: The problems.
        version: The version of jaxprtool.
        root: The folder that paths are relative to.
        about: The description of each code.
        failure: Why the command could not look for problems; None if it did.
    """
    codes = sorted({problem.code for problem in problems})
    rules = [
        {"id": code, "shortDescription": {"text": about.get(code) or f"the check '{code}'"}}
        for code in codes
    ]
    invocation: dict[str, Any] = {"executionSuccessful": failure is None}
    if failure is not None:
        notification = {"level": "error", "message": {"text": failure}}
        invocation["toolExecutionNotifications"] = [notification]
    run = {
        "tool": {"driver": {"name": "jaxprtool", "version": version, "rules": rules}},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": [_result(problem, codes.index(problem.code), root) for problem in problems],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(problem: Problem, rule: int, root: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": problem.code,
        "ruleIndex": rule,
        "level": problem.level,
        "message": {"text": problem.text},
    }
    if problem.annotated:
        result["locations"] = [{"physicalLocation": _location(problem.annotated, root)}]
    return result


def _location(place: Place, root: str) -> dict[str, Any]:
    path = _relative(place.path, root)
    if path is None:
        artifact = {"uri": "file://" + quote(place.path)}
    else:
        artifact = {"uri": quote(path), "uriBaseId": _BASE}
    return {"artifactLocation": artifact, "region": {"startLine": place.line}}


def _relative(file: str, root: str) -> str | None:
    """Return the path of a file from a folder, with slashes; None if it lies elsewhere."""
    path = os.path.relpath(os.path.realpath(file), os.path.realpath(root))
    return None if path.split(os.sep)[0] == os.pardir else path.replace(os.sep, "/")
