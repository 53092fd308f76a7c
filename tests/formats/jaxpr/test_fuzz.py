"""A mutated file is an error with a location, or a program that type-checks.

It never crashes or hangs, and needs no more memory than its size allows.
"""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprtool.errors import ProgramFileError
from jaxprtool.formats.jaxpr.read import parse_program, read
from jaxprtool.ir.program import Program, type_check
from tests.formats.jaxpr.golden import FOLDER
from tests.formats.jaxpr.mutations import MUTATIONS, Step, spoiled

FILES = sorted(FOLDER.glob("*/*.jaxpr"))
SECONDS = 10  # CPU time, since other processes may load the machine
MOST_SECONDS = 120
GIGABYTE = 1 << 20  # in kilobytes, as the system counts

STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(MUTATIONS)), st.integers(0, 99_999), st.integers(0, 99_999)),
    min_size=1,
    max_size=4,
)


class TooSlow(BaseException):
    """An exception that no code catches."""


@contextmanager
def limits(kilobytes: int = GIGABYTE) -> Iterator[None]:
    """Raise TooSlow after some seconds. Fail if memory use grows by more than a gigabyte."""

    def stop(*_: object) -> None:
        raise TooSlow(f"not done after {SECONDS} seconds of work, or {MOST_SECONDS} of waiting")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = [signal.signal(each, stop) for each in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for each, handler in zip((signal.SIGALRM, signal.SIGPROF), old, strict=True):
            signal.signal(each, handler)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < kilobytes


def outcome(text: str, path: Path | None = None) -> str:
    """Return the outcome of reading a text. Raises AssertionError if it is not allowed."""
    with limits():
        try:
            program = parse_program(text, "f.jaxpr", path)
        except ProgramFileError as error:
            assert error.message.isprintable()
            assert re.fullmatch(r"f\.jaxpr:\d+:\d+: \S.*", error.message), error.message
            return "an error with its place"
        check(program, text)
        return "a program that type-checks"


def check(program: Program, text: str) -> None:
    with jax.enable_x64(any(f"{name}[" in text for name in ("f64", "i64", "u64", "c128"))):
        type_check(program)


def fuzz(examples: int, seed: int) -> Counter[str]:
    texts = [path.read_text() for path in FILES]
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=examples)
    @given(st.sampled_from(range(len(texts))), STEPS)
    def spoil(number: int, steps: list[Step]) -> None:
        outcomes[outcome(spoiled(texts[number], steps), FILES[number])] += 1

    spoil()
    return outcomes


@pytest.mark.parametrize("chunk", range(4))
def test_a_mutated_file_is_an_error_or_a_program(chunk):
    outcomes = fuzz(100, chunk)
    assert min(outcomes["an error with its place"], outcomes["a program that type-checks"]) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(10))
def test_ten_thousand_mutated_files_are_errors_or_programs(chunk, record_property):
    record_property("outcomes", dict(fuzz(1000, 1000 + chunk)))


# --- the constants file ---------------------------------------------------------------------------


WITH_CONSTANTS = [path for path in FILES if Path(f"{path}.npz").exists()]


@pytest.mark.proof
@given(
    st.sampled_from(WITH_CONSTANTS or [None]),
    st.lists(st.tuples(st.integers(0, 99_999), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_mutated_constants_are_detected(tmp_path_factory, path, changes):
    data = bytearray(Path(f"{path}.npz").read_bytes())
    for at, byte in changes:
        data[at % len(data)] = byte
    spoilt = tmp_path_factory.mktemp("npz") / "f.jaxpr.npz"
    spoilt.write_bytes(data)
    outcome(path.read_text(), spoilt.with_suffix(""))


def stored(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def big(name: str) -> bytes:
    """Return an archive of a megabyte, with a member of this name of 200 MB of zeros."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(f"{name}.npy", "w", force_zip64=True) as member,
    ):
        header = "{'descr': '<f4', 'fortran_order': False, 'shape': (50000000,)}\n"
        member.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        for _ in range(200):
            member.write(bytes(1_000_000))
    return file.getvalue()


#: What may replace the constants file, given the name of a constant and its array.
BESIDE = {
    "nothing": lambda name, array: None,
    "no archive": lambda name, array: b"",
    "another": lambda name, array: stored({"other": array}),
    "altered": lambda name, array: stored({name: array + np.ones((), array.dtype)}),
    "another shape": lambda name, array: stored({name: array.reshape(-1)}),
    "another dtype": lambda name, array: stored({name: array.astype(np.float64)}),
    "objects": lambda name, array: stored({name: np.array([{}], dtype=object)}),
    "a bomb": lambda name, array: big(name),
}


@pytest.mark.parametrize("what", BESIDE)
def test_missing_and_altered_constants_are_named(what, tmp_path):
    path = next(path for path in WITH_CONSTANTS if path.stem == "constants")
    with np.load(f"{path}.npz") as arrays:
        name = arrays.files[0]
        beside = BESIDE[what](name, arrays[name])
    copy = tmp_path / "f.jaxpr"
    copy.write_text(path.read_text())
    if beside is not None:
        Path(f"{copy}.npz").write_bytes(beside)
    with limits(100_000), pytest.raises(ProgramFileError) as caught:
        read(copy)
    assert re.match(rf"{re.escape(str(copy))}:\d+:\d+: ", caught.value.message)
    assert "f.jaxpr.npz" in caught.value.message
    assert "sha256:" in caught.value.message


# --- regressions, and other hostile files ---------------------------------------------------------


HEADER = "jaxprtool 1\njax = ''\nname = 'f'\narguments = (('x',), {})\nresults = 'r'\n\n"


def with_value(value: str) -> str:
    """Return a program with a parameter of this value."""
    body = f"{{ lambda ; a:f32[3]. let b:f32[] = reduce_sum[axes={value}] a in (b,) }}"
    return HEADER + body


def chain(length: int, calls: int) -> str:
    """Return shared jaxprs, each of which calls the next one a number of times."""
    lets = [
        f"let f{i} = {{ lambda ; a:f32[]. let "
        + "".join(f"_:f32[] = jit[name=g jaxpr=f{i + 1}] a\n" for _ in range(calls))
        + "in (a,) } in\n"
        for i in range(length)
    ]
    last = f"let f{length} = {{ lambda ; a:f32[]. let in (a,) }} in\n"
    main = "{ lambda ; x:f32[]. let y:f32[] = jit[name=g jaxpr=f0] x in (y,) }"
    return HEADER + "".join(lets) + last + main


HARMFUL = {
    "a result that is a ref": HEADER + "{ lambda ; a:Ref{f32[]}. let in (a,) }",
    "a lone surrogate": HEADER + "{ lambda ; a:f32[]. let b:f32[] = \ud800 a in (b,) }",
    "a NUL in a path": "jaxprtool 1\nfiles = {'a': '\\x00'}\n" + HEADER.split("\n", 1)[1],
    "a number of many digits": with_value("9" * 5000),
    "many signs": with_value("-" * 100_000 + "1"),
    "many operators": with_value("1" + "-1" * 100_000),
    "a long dotted name": with_value("a" + ".a" * 100_000),
    "many brackets": with_value("(" * 100_000 + ")" * 100_000),
    "many jaxprs in each other": with_value("{ lambda ; . let f[a=" * 10_000),
    "many values": with_value("(" + "1," * 1_100_000 + ")"),
    "a constant that is too large for its text": (
        HEADER + "{ lambda c:f32[99999999999,99999]=[1.0]; a:f32[]. let in (a,) }"
    ),
    "a literal that is too large for its text": (
        HEADER + "{ lambda ; a:f32[]. let in (base64('AAAA'):f32[99999999999,99999],) }"
    ),
    "an unused type of endless rank": HEADER
    + f"{{ lambda ; a:f32[{'1,' * 99_999}1]. let in (b,) }}",
    "a definition by itself": chain(3, 1).replace("jaxpr=f3", "jaxpr=f0"),
    "a long chain of shared jaxprs": chain(200, 1),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_hostile_files_are_refused(what):
    assert outcome(HARMFUL[what]) == "an error with its place"


def test_exponentially_shared_jaxprs_are_read_once_each():
    assert outcome(chain(50, 2)) == "a program that type-checks"


def test_huge_types_need_no_memory():
    body = """{ lambda ; a:f32[]. let
        b:f32[99999999999,99999] = broadcast_in_dim a
        c:i32[99999999999] = iota[dimension=0 dtype=int32 shape=(99999999999,) sharding=None]
        d:f32[99999999999,99999] = sin b
      in (d,) }"""
    assert outcome(HEADER + body) == "a program that type-checks"


LONG_LINES = {
    "one word": lambda n: "x" * n,
    "a name": lambda n: f"{{ lambda ; a:f32[]. let b:f32[] = {'s' * n} a in (b,) }}",
    "a type": lambda n: f"{{ lambda ; a:f32[{'1,' * (n // 2)}]. let in (a,) }}",
    "operands": lambda n: f"{{ lambda ; a:f32[]. let b:f32[] = sin{' a' * (n // 2)} in (b,) }}",
    "results": lambda n: f"{{ lambda ; a:f32[]. let in ({'a,' * (n // 2)}) }}",
    "numbers": lambda n: f"{{ lambda a:f32[3]=[{'1,' * (n // 2)}]; . let in (a,) }}",
    "strings": lambda n: f"{{ lambda a:f32[3]=({chr(39) * n}); . let in (a,) }}",
}


@pytest.mark.parametrize("what", LONG_LINES)
def test_a_line_of_forty_megabytes_is_refused_at_once(what):
    text = HEADER + LONG_LINES[what](40_000_000)
    with limits(400_000), pytest.raises(ProgramFileError) as caught:
        parse_program(text, "f.jaxpr")
    assert caught.value.message == "f.jaxpr:7:1: a line is longer than 4,000,000 characters"


@pytest.mark.proof
def test_a_constant_in_the_text_may_exceed_the_maximum_line_length():
    words = "A" * 8_000_000
    text = f"{HEADER}{{ lambda c:u8[6000000]=base64('{words}'); a:f32[]. let in (c,) }}"
    assert parse_program(text, "f.jaxpr").jaxpr.consts[0].size == 6_000_000


def test_a_message_quotes_only_a_few_words_of_the_file():
    text = f"{HEADER}{{ lambda ; a:f32[]. let b:f32[] = {'s' * 1_000_000} a in (b,) }}"
    with limits(), pytest.raises(ProgramFileError) as caught:
        parse_program(text, "f.jaxpr")
    assert len(caught.value.message) < 500 and "unknown primitive 'sss" in caught.value.message


@pytest.mark.parametrize("name", ["f.jaxpr", "f.jaxpr.npz"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_endless_files_are_refused_at_once(name, kind, tmp_path):
    path = next(path for path in WITH_CONSTANTS if path.stem == "constants")
    (tmp_path / "f.jaxpr").write_text(path.read_text())
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with limits(), pytest.raises(ProgramFileError, match="it is a device or a pipe") as caught:
        read(tmp_path / "f.jaxpr")
    assert str(tmp_path / name) in caught.value.message
