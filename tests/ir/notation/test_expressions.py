"""Parsing expressions: literals have Python's values, and hostile text is refused quickly."""

import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.ir.notation.expressions import MAX_DEPTH, MAX_LENGTH, parse_arguments


def source(text):
    return parse_arguments(text, "--args", ArgumentsError)


def literal(text):
    parsed = source(text)
    (node,) = parsed.args
    return parsed.literal(node)


def message(text):
    with pytest.raises(ArgumentsError) as caught:
        literal(text)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "-3",
        "+2.5",
        "1j",
        "1+2j",
        "-1-2j",
        "1e999",
        "True",
        "None",
        "'a'",
        "''",
        "'a''b'",
        "()",
        "(1,)",
        "[1,[2]]",
        "0xff",
        "1_000",
        "{'a': 1, 2: (3, 4), (1, 'b'): []}",
    ],
)
def test_literals_have_the_value_of_python(text):
    value = literal(text)
    assert value == ast.literal_eval(text)
    assert type(value) is type(ast.literal_eval(text))


def test_inf_and_nan_are_numbers():
    assert literal("-inf") == -math.inf
    assert math.isnan(literal("nan"))


def test_an_argument_list_has_positions_and_keywords():
    parsed = source(" dce, batch(in_axes=0), -O1, a.b, x = 1 ,y=2 # and a comment")
    kinds = [type(node).__name__ for node in parsed.args]
    assert kinds == ["Name", "Call", "UnaryOp", "Attribute"]
    assert [name for name, _ in parsed.keywords] == ["x", "y"]
    assert source("").args == ()
    assert source("1, 2,").args != ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, a.b]", "attribute access is not allowed in --args (column 5)"),
        ("g(1)", "a call is not allowed in --args (column 1)"),
        ("[x for x in (1, 2)]", "a comprehension is not allowed in --args (column 1)"),
        ("(x for x in y)", "a comprehension is not allowed in --args (column 1)"),
        ("lambda: 0", "a lambda is not allowed in --args (column 1)"),
        ("f'{a}'", "an f-string is not allowed in --args (column 2)"),
        ("*a", "unpacking with '*' is not allowed in --args (column 1)"),
        ("**a", "unpacking with '**' is not allowed in --args (column 3)"),
        ("{**a}", "unpacking with '**' is not allowed in --args (column 1)"),
        ("(a := 1)", "an assignment ':=' is not allowed in --args (column 2)"),
        ("1 if a else 2", "a conditional expression is not allowed in --args (column 1)"),
        ("10 ** 10", "arithmetic is not allowed in --args (column 1)"),
        ("not True", "an operator is not allowed in --args (column 1)"),
        ("-True", "an operator is not allowed in --args (column 1)"),
        ("1 < 2", "a comparison is not allowed in --args (column 1)"),
        ("{1}", "a set is not allowed in --args (column 1)"),
        ("b'x'", "the literal b'x' is not allowed in --args (column 1)"),
        ("...", "the literal ... is not allowed in --args (column 1)"),
        ("foo", "the name 'foo' is not allowed in --args (column 1)"),
        ("{[1]: 2}", "a dict's key cannot be a list or a dict (column 2)"),
        ("['é', a.b]", "attribute access is not allowed in --args (column 7)"),
        ("[1,\n  a.b]", "attribute access is not allowed in --args (line 2, column 3)"),
        ("[1,\r\n  a.b]", "attribute access is not allowed in --args (line 2, column 3)"),
    ],
)
def test_a_non_literal_is_reported_with_its_position(text, expected):
    assert message(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b", "invalid syntax. Perhaps you forgot a comma? (column 1)"),
        ("1 +", "invalid syntax (at the end)"),
        ("x=1, 2", "positional argument follows keyword argument (at the end)"),
        ("x=1, x=2", "'x' is given twice in --args (column 8)"),
        ("[1, 2", "'[' in --args is not closed (column 1)"),
        ("[1, 2)", "')' in --args does not match an opening bracket (column 6)"),
        ("'abc", "a string in --args is not closed (column 1)"),
        ("'a\0b'", "--args contains a NUL character (column 3)"),
        ("'\ud800'", "--args is not valid Unicode text"),
        ("9" * 5000, "--args has an integer of more than 64 bits"),
        ("0x" + "f" * 5000, "an integer has more than 64 bits (column 1)"),
    ],
)
def test_malformed_text_is_reported_with_its_position(text, expected):
    assert expected in message(text)


@pytest.mark.parametrize(
    "text", [") + evil(", ")(", "), f(", ") if x else f(", ").a(", "1) #", "1))", "'' ) or ('"]
)
def test_text_cannot_leave_its_parentheses(text):
    assert "does not match an opening bracket" in message(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000 + "]" * 1000,
        "[" * 1000,
        "(" * 1000 + "1" + ")" * 1000,
        "{1:" * 1000 + "1" + "}" * 1000,
        "-" * 20000 + "1",
        "not " * 10000 + "1",
        "1" + "+1" * 20000,
        "1" + "**1" * 10000,
        "a" + ".a" * 20000,
        "a" + "()" * 20000,
        "lambda:" * 5000 + "1",
        "1 if 1 else " * 5000 + "1",
        "-" * (MAX_DEPTH + 2) + "1",
    ],
)
def test_deep_nesting_is_refused(text):
    assert "nested too deeply" in message(text)


def test_the_deepest_allowed_nesting_is_parsed():
    assert literal("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert literal("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1


def test_brackets_inside_strings_do_not_count():
    assert literal("'[[['") == "[[["
    assert literal("'''(\n'''") == "(\n"
    assert literal(r"'\'('") == "'("


def test_types_are_parsed_where_allowed():
    text = "f32[], {'x': i8[ ]}, 'a[]', [], key<fry>[2], é, f32[8@(x,y),\n n]{V:i}, [b[1]], a.b"
    parsed = parse_arguments(text, "--args", ArgumentsError, types=True)
    scalar, nested, string, empty, key, name, mesh, row, attribute = parsed.args

    def typed(node):
        return text[where] if (where := parsed.type_at(node)) else None

    assert typed(scalar) == parsed.segment(scalar) == "f32[]"
    assert typed(nested.values[0]) == "i8[ ]"
    assert (parsed.literal(string), parsed.literal(empty)) == ("a[]", [])
    assert typed(key) == "key<fry>[2]" and typed(name) is None
    assert typed(mesh) == "f32[8@(x,y),\n n]{V:i}"
    assert [typed(node) for node in row.elts] == ["b[1]"]
    assert parsed.place(attribute) == "line 2, column 19"
    assert "invalid syntax" in message("f32[]")


def test_a_part_of_a_text_keeps_its_positions():
    parsed = parse_arguments("'é', x[\n n-a.b]", "--args", ArgumentsError, types=True)
    where = parsed.type_at(parsed.args[1])
    node = parsed.part(slice(where.start + 2, where.stop - 1))
    with pytest.raises(ArgumentsError, match=r"attribute access .* \(line 2, column 4\)"):
        raise parsed.not_allowed(node.right)


def test_long_text_is_refused_before_it_is_parsed():
    assert "10,000,000 characters" in message("x" * 10_000_000)
    assert len(literal("'" + "x" * (MAX_LENGTH - 2) + "'")) == MAX_LENGTH - 2


alphabet = st.sampled_from([*"()[]{}'\"\\\n,.:=*-+#ab1fj ", "'''", "lambda ", " for "])


@pytest.mark.proof
@given(st.lists(alphabet, max_size=40).map("".join) | st.text(max_size=40))
def test_any_text_raises_only_our_errors(text):
    try:
        parsed = source(text)
        for node in parsed.args:
            parsed.segment(node)
            parsed.literal(node)
    except JaxprToolError as error:
        assert "\n" not in error.message


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text("ab"), inner),
    max_leaves=10,
)


@given(values)
def test_repr_of_python_values_is_parsed(value):
    assert literal(repr(value)) == value
