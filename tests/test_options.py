"""From text to checked values."""

from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.options import check_limits, construct, convert, flag, option, options_of, parse_options, suggest

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
def test_whole_numbers(text, number):
    value = convert(text, int)
    assert value == number
    assert type(value) is int


@pytest.mark.parametrize("text", ["0.5", 2.5, "1.0001k", "0.0001k"])
def test_what_is_not_whole_is_refused(text):
    with pytest.raises(ValueError, match="whole number"):
        convert(text, int)


@pytest.mark.parametrize(
    ("text", "number"), [("0.5", 0.5), ("-0.25", -0.25), ("1e-5", 1e-5), ("6e-4", 6e-4), ("2k", 2000.0), (1, 1.0)]
)
def test_floats(text, number):
    assert convert(text, float) == pytest.approx(number)


def test_floats_are_floats_with_a_suffix_too():
    assert type(convert("2k", float)) is float


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize(
    "text", ["", "abc", "k", "5MM", "5 M x", "nan", "inf", "-inf", "1e999", "0x10", "5T", True, None, [1]]
)
def test_bad_numbers(text, kind):
    with pytest.raises(ValueError, match="expected a number"):
        convert(text, kind)


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_whole_number_survives_as_text(number):
    """A seed given on the command line is the seed that config.toml records."""
    assert convert(str(number), int) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_as_text(number):
    assert convert(repr(number), float) == number


# --- the other kinds ---


@pytest.mark.parametrize("text", ["true", "True", "on", "ON", "yes", True])
def test_on(text):
    assert convert(text, bool) is True


@pytest.mark.parametrize("text", ["false", "off", "no", "No", False])
def test_off(text):
    assert convert(text, bool) is False


@pytest.mark.parametrize("text", ["1", "maybe", "", 1, None])
def test_bad_bool(text):
    with pytest.raises(ValueError, match="on or off"):
        convert(text, bool)


@pytest.mark.parametrize("value", ["84x96", "84,96", [84, 96], (84, 96), ["84", "96"]])
def test_pairs(value):
    assert convert(value, tuple[int, int]) == (84, 96)


@pytest.mark.parametrize("value", ["84", "84x84x3", [84], 84])
def test_pairs_of_the_wrong_length(value):
    with pytest.raises(ValueError, match=r"expected 2 values, such as 84x84"):
        convert(value, tuple[int, int])


@pytest.mark.parametrize(("value", "expected"), [("16", (16,)), ("16x32x32", (16, 32, 32)), ([8], (8,)), (8, (8,))])
def test_tuples_of_any_length(value, expected):
    assert convert(value, tuple[int, ...]) == expected


def test_bad_item_of_a_tuple():
    with pytest.raises(ValueError, match="expected a number"):
        convert("84xbig", tuple[int, int])


@pytest.mark.parametrize("value", [None, "none"])
def test_optional(value):
    assert convert(value, int | None) is None
    assert convert(value, str | None) is None


def test_optional_with_a_value():
    assert convert("5k", int | None) == 5_000
    assert convert("project", str | None) == "project"


def test_none_is_text_where_it_may_be():
    assert convert("none", str) == "none"


@pytest.mark.parametrize("value", [1, 1.5, True, ["a"], None])
def test_text_is_text(value):
    with pytest.raises(ValueError, match="expected str"):
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
def test_outside_the_limits(value, limits, message):
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
def test_inside_the_limits(value, limits):
    check_limits(value, limits)


# --- options of a part ---


@dataclass(frozen=True)
class Example:
    width: int = option(64, "units", low=1)
    num_layers: int = option(1, "layers", low=1, high=4)
    rate: float = option(0.1, "rate", above=0, everyday=True)

    def __post_init__(self):
        if self.width == self.num_layers:
            raise ValueError("--width and --num-layers must differ")


def test_parse_options():
    problems: list[str] = []
    parsed = parse_options(Example, {"width": "1k", "rate": "0.5"}, "torso", problems)
    assert parsed == Example(1000, 1, 0.5)
    assert problems == []


def test_parse_options_reports_everything_at_once():
    problems: list[str] = []
    given = {"width": "wide", "num_layers": "9", "rate": "0"}
    assert parse_options(Example, given, "torso", problems) is None
    assert problems == [
        "--torso.width wide: expected a number, such as 0.5, 20000, 200k or 5M",
        "--torso.num-layers 9: must be at most 4",
        "--rate 0: must be above 0",
    ]


def test_parse_options_reports_what_the_options_find_themselves():
    problems: list[str] = []
    assert parse_options(Example, {"width": 2, "num_layers": 2}, "torso", problems) is None
    assert problems == ["--width and --num-layers must differ"]


def test_flags():
    width, layers, rate = fields(Example)
    assert flag("torso", width) == "--torso.width"
    assert flag("torso", layers) == "--torso.num-layers"
    assert flag("torso", rate) == "--rate"
    assert flag("env", layers) == flag("", layers) == "--num-layers"


class ByDataclass:
    @dataclass(frozen=True)
    class Options:
        width: int = option(64, "units")

    def __init__(self, size, options=Options(), *, extra=0):
        self.made = (size, options.width, extra)


class ByKeywords:
    def __init__(self, size, *, width=64, rate: float = 1, extra=0):
        self.made = (size, width, extra)
        self.rate = rate


def test_options_of_either_kind():
    assert options_of(ByDataclass) is ByDataclass.Options
    options = options_of(ByKeywords)
    assert [field.name for field in fields(options)] == ["width", "rate", "extra"]
    parsed = parse_options(options, {"width": "32", "rate": "0.5"}, "torso", [])
    assert (parsed.width, parsed.rate, parsed.extra) == (32, 0.5, 0)


def test_construct_either_kind():
    assert construct(ByDataclass, 5, options=ByDataclass.Options(32), extra=7).made == (5, 32, 7)
    made = construct(ByKeywords, 5, options=options_of(ByKeywords)(width=32, rate=0.5, extra=7))
    assert made.made == (5, 32, 7)
    assert made.rate == 0.5


# --- suggestions ---


def test_suggest():
    assert suggest("lsmt", ["lstm", "gru", "none"]) == "; did you mean lstm?"
    assert suggest("pong", ["Pong", "Breakout"]) == "; did you mean Pong?"
    assert suggest("zzz", ["lstm", "gru"]) == ""
    assert suggest("hiddn", ["hidden", "hiding", "hidder"]).count(" or ") <= 2
