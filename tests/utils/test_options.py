"""Conversion of text to validated option values."""

from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.utils.errors import UserError
from bestiary.utils.options import (
    check_limits,
    construct,
    convert,
    flag_name,
    option,
    options_class,
    parse_options,
    suggest,
)

# --- numbers ---


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("50M", 50_000_000),
        ("200k", 200_000),
        ("200K", 200_000),
        ("1.5k", 1_500),
        ("2G", 2_000_000_000),
        ("2B", 2_000_000_000),
        ("1e6", 1_000_000),
        ("1_000", 1_000),
        ("20000", 20_000),
        (" 7 ", 7),
        ("-3", -3),
        ("-3k", -3_000),
        (0, 0),
        (12, 12),
        (12.0, 12),
    ],
)
def test_integers(text, number):
    value = convert(text, int)
    assert value == number
    assert type(value) is int


@pytest.mark.parametrize("text", ["0.5", 2.5, "1.0001k", "0.0001k"])
def test_fractions_are_rejected_as_integers(text):
    with pytest.raises(ValueError, match="expected an integer"):
        convert(text, int)


@pytest.mark.parametrize(
    ("text", "number"), [("0.5", 0.5), ("-0.25", -0.25), ("1e-5", 1e-5), ("6e-4", 6e-4), ("2k", 2000.0), (1, 1.0)]
)
def test_floats(text, number):
    assert convert(text, float) == pytest.approx(number)


def test_numbers_with_suffix_are_floats():
    assert type(convert("2k", float)) is float


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize(
    "text", ["", "abc", "k", "5MM", "5 M x", "nan", "inf", "-inf", "1e999", "0x10", "5T", True, None, [1]]
)
def test_invalid_numbers_are_rejected(text, kind):
    with pytest.raises(ValueError, match="expected a number"):
        convert(text, kind)


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_are_converted_exactly(number):
    """A seed of the command line must be stored unchanged in config.toml."""
    assert convert(str(number), int) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_converted_exactly(number):
    assert convert(repr(number), float) == number


# --- other types ---


@pytest.mark.parametrize("text", ["true", "True", "on", "ON", "yes", True])
def test_true(text):
    assert convert(text, bool) is True


@pytest.mark.parametrize("text", ["false", "off", "no", "No", False])
def test_false(text):
    assert convert(text, bool) is False


@pytest.mark.parametrize("text", ["1", "maybe", "", 1, None])
def test_invalid_booleans_are_rejected(text):
    with pytest.raises(ValueError, match="on or off"):
        convert(text, bool)


@pytest.mark.parametrize("value", ["84x96", "84,96", [84, 96], (84, 96), ["84", "96"]])
def test_pairs(value):
    assert convert(value, tuple[int, int]) == (84, 96)


@pytest.mark.parametrize("value", ["84", "84x84x3", [84], 84])
def test_pairs_of_wrong_length_are_rejected(value):
    with pytest.raises(ValueError, match=r"expected 2 values, such as 84x84"):
        convert(value, tuple[int, int])


@pytest.mark.parametrize(("value", "expected"), [("16", (16,)), ("16x32x32", (16, 32, 32)), ([8], (8,)), (8, (8,))])
def test_tuples_of_any_length(value, expected):
    assert convert(value, tuple[int, ...]) == expected


@pytest.mark.parametrize("value", ["examples/x.py:A, b.py:B", ["examples/x.py:A", "b.py:B"]])
def test_tuples_of_texts_are_separated_by_commas_only(value):
    assert convert(value, tuple[str, ...] | None) == ("examples/x.py:A", "b.py:B")


def test_invalid_item_of_a_tuple_is_rejected():
    with pytest.raises(ValueError, match="expected a number"):
        convert("84xbig", tuple[int, int])


@pytest.mark.parametrize("value", [None, "none"])
def test_optional(value):
    assert convert(value, int | None) is None
    assert convert(value, str | None) is None


def test_optional_with_a_value():
    assert convert("5k", int | None) == 5_000
    assert convert("project", str | None) == "project"


def test_none_is_text_for_a_required_string():
    assert convert("none", str) == "none"


@pytest.mark.parametrize("value", [1, 1.5, True, ["a"], None])
def test_values_that_are_not_strings_are_rejected(value):
    with pytest.raises(ValueError, match="expected text"):
        convert(value, str)


# --- limits ---


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (0, {"low": 1}, "must be at least 1"),
        (11, {"high": 10}, "must be at most 10"),
        (0.0, {"above": 0}, "must be above 0"),
        ((84, 4), {"low": 8}, "must be at least 8"),
        ("rmsprob", {"choices": ("rmsprop", "adam")}, "one of rmsprop, adam; did you mean rmsprop?"),
    ],
)
def test_values_outside_the_limits_are_rejected(value, limits, message):
    with pytest.raises(ValueError, match=r"^(must|expected)") as error:
        check_limits(value, limits)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (1, {"low": 1, "high": 1}),
        (1e-9, {"above": 0}),
        (None, {"low": 1}),
        ("adam", {"choices": ("rmsprop", "adam")}),
        ((8, 8), {"low": 8}),
    ],
)
def test_values_inside_the_limits_are_accepted(value, limits):
    check_limits(value, limits)


# --- options of a component ---


@dataclass(frozen=True)
class Example:
    width: int = option(64, "units", low=1)
    num_layers: int = option(1, "layers", low=1, high=4)
    rate: float = option(0.1, "rate", above=0, unprefixed=True)

    def __post_init__(self):
        if self.width == self.num_layers:
            raise ValueError("--width and --num-layers must differ")


def test_parse_options():
    problems: list[str] = []
    parsed = parse_options(Example, {"width": "1k", "rate": "0.5"}, "torso", problems)
    assert parsed == Example(1000, 1, 0.5)
    assert problems == []


def test_parse_options_reports_all_problems():
    problems: list[str] = []
    given = {"width": "wide", "num_layers": "9", "rate": "0"}
    assert parse_options(Example, given, "torso", problems) is None
    width, num_layers, rate = problems
    assert width.startswith("--torso.width wide: expected a number")
    assert num_layers == "--torso.num-layers 9: must be at most 4"
    assert rate == "--rate 0: must be above 0"


def test_parse_options_reports_errors_of_the_options_class():
    problems: list[str] = []
    assert parse_options(Example, {"width": 2, "num_layers": 2}, "torso", problems) is None
    assert problems == ["--width and --num-layers must differ"]


class Undecorated:
    class Options:
        size: int = 3


class UndecoratedSubclass:
    class Options(Example):
        size: int = 3


@pytest.mark.parametrize("component", [Undecorated, UndecoratedSubclass])
def test_options_class_without_the_dataclass_decorator_is_refused(component):
    """Fields of such a class would be ignored."""
    with pytest.raises(UserError, match=rf"{component.__name__}.Options: not a dataclass; write @dataclass"):
        options_class(component)


def test_flag_names():
    width, layers, rate = fields(Example)
    assert flag_name("torso", width) == "--torso.width"
    assert flag_name("torso", layers) == "--torso.num-layers"
    assert flag_name("torso", rate) == "--rate"
    assert flag_name("env", layers) == flag_name("", layers) == "--num-layers"


class WithOptionsClass:
    @dataclass(frozen=True)
    class Options:
        width: int = option(64, "units")

    def __init__(self, size, options=Options(), *, extra=0):
        self.arguments = (size, options.width, extra)


class WithKeywords:
    def __init__(self, size, *, width=64, rate: float = 1, extra=0):
        self.arguments = (size, width, extra)
        self.rate = rate


def test_options_class_of_both_forms():
    assert options_class(WithOptionsClass) is WithOptionsClass.Options
    options = options_class(WithKeywords)
    assert [field.name for field in fields(options)] == ["width", "rate", "extra"]
    parsed = parse_options(options, {"width": "32", "rate": "0.5"}, "torso", [])
    assert (parsed.width, parsed.rate, parsed.extra) == (32, 0.5, 0)


def test_construct_both_forms():
    component = construct(WithOptionsClass, 5, options=WithOptionsClass.Options(32), extra=7)
    assert component.arguments == (5, 32, 7)
    component = construct(WithKeywords, 5, options=options_class(WithKeywords)(width=32, rate=0.5, extra=7))
    assert component.arguments == (5, 32, 7)
    assert component.rate == 0.5


# --- suggestions ---


def test_suggest():
    assert suggest("lsmt", ["lstm", "gru", "none"]) == "; did you mean lstm?"
    assert suggest("pong", ["Pong", "Breakout"]) == "; did you mean Pong?"
    assert suggest("zzz", ["lstm", "gru"]) == ""
    assert suggest("hiddn", ["hidden", "hiding", "hidder"]).count(" or ") <= 2
