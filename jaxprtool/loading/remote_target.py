"""Tracing of a TARGET at a git revision, or by another Python, in a separate process.

The files of the revision are unpacked into a temporary folder, where `jaxprtool opt` writes the
program to a `.jaxpr` file. Modules of two revisions, or two releases of JAX, are thus never in one
process, and the user's own files are not changed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from jaxprtool import processes
from jaxprtool.errors import JaxprToolError, TargetError, UserFunctionError
from jaxprtool.loading.target import is_call, split_target

_FUNCTION_RAISED = UserFunctionError.exit_code


@dataclass(frozen=True)
class RemoteTarget:
    """Where a TARGET is traced.

    Attributes:
        target: The TARGET, without its revision.
        revision: The git revision; None for the working tree.
        python: The Python interpreter that traces it, if it is another one.
    """

    target: str
    revision: str | None = None
    python: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is traced in this process from the working tree."""
        return self.revision is None and self.python is None

    def __str__(self) -> str:
        at = "" if self.revision is None else f"@{self.revision}"
        by = "" if self.python is None else f", traced by {self.python}"
        return f"{self.target}{at}{by}"


def elsewhere(target: str, python: str | None = None) -> RemoteTarget:
    """Return the place of a TARGET that may have a revision: `model.py:loss@HEAD~1`."""
    place, at, revision = target.rpartition("@")
    if is_call(target) or os.path.exists(target):
        return RemoteTarget(target, None, python)
    if at and (":" in place or place.endswith(".jaxpr")):
        return RemoteTarget(place, revision, python)
    return RemoteTarget(target, None, python)


@contextmanager
def written_elsewhere(place: RemoteTarget, options: Sequence[str]) -> Iterator[str]:
    """Trace a TARGET elsewhere, and yield the path of its temporary program file.

    Args:
        place: The TARGET and where it is traced.
        options: Options of `jaxprtool opt`, such as `--args`.

    Raises:
        TargetError: If the revision or Python does not exist, or the function cannot be loaded.
        UserFunctionError: If it raises.
    """
    python = _python(place)
    with processes.temporary_folder() as folder:
        file = os.path.join(folder, "program.jaxpr")
        target, cwd = place.target, os.getcwd()
        path: list[str] = []
        if place.revision is not None:
            files = os.path.join(folder, "files")
            target, cwd, path = _unpacked(place, files)
        command = [python, "-P", "-m", "jaxprtool", "opt", target, "-o", file]
        env = dict(os.environ)
        if path:
            env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [env.get("PYTHONPATH")])])
        command += ["--callbacks", "stub", *options]
        outcome = processes.run_process(command, cwd=cwd, env=env)
        if outcome.status != 0:
            raise _fault(place, outcome)
        yield file


def _python(place: RemoteTarget) -> str:
    if place.python is None:
        return sys.executable
    interpreter = shutil.which(os.path.expanduser(place.python))
    if interpreter is None:
        hint = "name the interpreter of an environment, such as .venv/bin/python"
        raise TargetError(f"cannot run '{place.python}' as a Python interpreter", hint)
    return os.path.abspath(interpreter)


def _fault(place: RemoteTarget, outcome: processes.CommandOutcome) -> JaxprToolError:
    """Return the error that the other process reported."""
    lines = outcome.stderr.splitlines()
    said = [line.partition(": ")[2] for line in lines if line.startswith("error: ")]
    hints = [line.partition(": ")[2] for line in lines if line.startswith("hint: ")]
    if not said and "No module named jaxprtool" in outcome.stderr:
        python = place.python or sys.executable
        return TargetError(
            f"jaxprtool is not installed for {python}",
            f"install it there, in a clone with `{python} -m pip install .`",
        )
    error_type = UserFunctionError if outcome.status == _FUNCTION_RAISED else TargetError
    message = f"{place}: {said[-1] if said else outcome}"
    return error_type(message, hints[-1] if hints else None)


# --- revisions ------------------------------------------------------------------------------------


def _unpacked(place: RemoteTarget, folder: str) -> tuple[str, str, list[str]]:
    """Unpack the files of a revision into a folder.

    Returns:
        The TARGET in them, the folder to run in, and the folders to import from.
    """
    path = split_target(place.target).place
    is_file = os.path.isfile(path) or path.endswith((".py", ".jaxpr")) or os.sep in path
    base = os.path.dirname(os.path.abspath(path)) if is_file else os.getcwd()
    while not os.path.isdir(base):  # the file may have been deleted since
        base = os.path.dirname(base)
    top = os.path.realpath(_git(base, "rev-parse", "--show-toplevel").strip())
    revision = f"{place.revision}^{{commit}}"
    commit = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", revision).strip()
    if not commit:
        raise TargetError(f"{place}: no revision '{place.revision}' in {top}")
    imported = [] if is_file else [_root_of(place, path, top)]
    archive = f"{folder}.tar"
    _git(top, "archive", "--format=tar", "-o", archive, commit)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter=_inside)
    cwd = os.path.realpath(os.getcwd())
    there = os.path.join(folder, _below(cwd, top) or "")
    os.makedirs(there, exist_ok=True)
    package_root = str(Path(__file__).resolve().parents[2])  # where this package is imported from
    imported += [entry for entry in map(os.path.realpath, sys.path) if entry != package_root]
    mapped = [below for entry in imported if (below := _below(entry, top)) is not None]
    target = place.target
    if is_file:
        inside = _below(os.path.realpath(os.path.abspath(path)), top)
        if inside is None:
            raise TargetError(f"{place}: '{path}' is a link to a file outside {top}")
        whole = os.path.join(folder, inside)
        if not os.path.isfile(whole):
            raise TargetError(f"{place}: no file '{path}' in that revision")
        target = os.path.relpath(whole, there) + target[len(path) :]
    return target, there, [os.path.join(folder, entry) for entry in dict.fromkeys(mapped)]


def _inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Return a member of an archive; None for a link that leads out of the folder."""
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


def _below(path: str, top: str) -> str | None:
    """Return a path relative to a folder above it; None if it is not inside that folder."""
    inside = os.path.relpath(path, top)
    return None if inside.split(os.sep)[0] == os.pardir else inside


def _root_of(place: RemoteTarget, module: str, top: str) -> str:
    """Return the folder from which a module is imported."""
    name = module.partition(".")[0]
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or importlib.util.find_spec(name)
    files = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    for file in filter(None, files):
        root = os.path.dirname(os.path.realpath(file))
        if file == spec.origin and spec.submodule_search_locations:  # type: ignore[union-attr]
            root = os.path.dirname(root)
        if _below(root, top) is not None:
            return root
    raise TargetError(f"{place}: the module '{name}' is not in the git repository {top}")


def _git(folder: str, *arguments: str) -> str:
    """Return the output of git; empty if it fails and is run quietly."""
    if shutil.which("git") is None:
        raise TargetError("git revisions need git, which is not installed")
    outcome = processes.run_process(["git", "-C", folder, *arguments])
    if outcome.status == 0 or "--quiet" in arguments:
        return outcome.stdout
    if "not a git repository" in outcome.stderr:
        raise TargetError(f"{folder} is not in a git repository, so it has no revisions")
    raise TargetError(f"git {arguments[0]}: {processes.stderr_tail(outcome.stderr)}")
