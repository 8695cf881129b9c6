"""Line numbers of keys, for all notations of TOML."""

from bestiary.studies.study_file import key_lines

TEXT = """\
# a study
name = "x"
seeds = [
    1,  # not = a key
    2,
]

[base]
frame-stack = 4
memory.name = "lstm"
torso = { name = "mlp", width = 3 }
about = \"\"\"
lr = 3
\"\"\"

[base.algo]
lr = 0.1

[[variant]]
name = "a"

[[variant]]
name = "b"
memory.hidden = 8
"""


def test_key_lines_are_the_first_lines_of_the_keys() -> None:
    lines = key_lines(TEXT)
    expected = {
        ("", "name"): 2,
        ("", "seeds"): 3,
        ("base", ""): 8,
        ("base", "frame_stack"): 9,
        ("base", "memory"): 10,
        ("base", "torso"): 11,
        ("base", "torso.width"): 11,
        ("base", "about"): 12,
        ("base", "algo.lr"): 17,
        ("variant 0", ""): 19,
        ("variant 1", ""): 22,
        ("variant 1", "name"): 23,
        ("variant 1", "memory.hidden"): 24,
    }
    assert {key: lines.get(key) for key in expected} == expected
    assert ("base", "lr") not in lines
