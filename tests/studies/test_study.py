"""Study files: the variants they describe, and the messages for wrong files."""

from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from bestiary.studies.study import Study, read_study
from bestiary.studies.trial import make_trials
from bestiary.utils import trust
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef

OWN = """
import gymnasium

class Own(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return 0, {}
    def step(self, action):
        return 0, 1.0, True, False, {}
"""


def study(text: str) -> Study:
    Path("s.toml").write_text(text)
    return read_study(Path("s.toml"))


def test_grid_gives_all_combinations() -> None:
    found = study("""
        name = "memories"
        seeds = [3, 1]
        [base]
        env = "toy/recall"
        steps = "2k"
        [grid]
        memory = ["gru", "lstm"]
        "memory.hidden" = [8, 16]
        """)
    names = ["memory=gru,memory.hidden=8", "memory=gru,memory.hidden=16"]
    names += ["memory=lstm,memory.hidden=8", "memory=lstm,memory.hidden=16"]
    assert [variant.name for variant in found.variants] == names
    memories = [variant.config.components["memory"] for variant in found.variants]
    assert [(memory.name, memory.options.hidden) for memory in memories] == [
        ("gru", 8),
        ("gru", 16),
        ("lstm", 8),
        ("lstm", 16),
    ]
    trials = make_trials(found, Path("runs/memories"))
    assert [trial.path.name for trial in trials[:3]] == [f"{names[0]}-s3", f"{names[0]}-s1", f"{names[1]}-s3"]
    assert {trial.config.training.seed for trial in trials} == {1, 3}
    assert {trial.total_steps for trial in trials} == {2_000}


def test_options_of_variants_override_the_base() -> None:
    found = study("""
        seeds = [1]
        evaluate = 7
        [base]
        preset = "recall"
        steps = 500
        memory = { name = "lstm", hidden = 8 }
        [[variant]]
        name = "plain"
        [[variant]]
        name = "none"
        memory = "none"     # also removes the options of the LSTM
        [[variant]]
        name = "wide"
        memory.hidden = 32
        lr = 0.1
        """)
    assert found.name == "s"
    plain, none, wide = found.variants
    assert [variant.name for variant in found.variants] == ["plain", "none", "wide"]
    assert plain.config.components["memory"].options.hidden == 8
    assert none.config.components["memory"].name == "none"
    assert wide.config.components["memory"].options.hidden == 32
    assert wide.config.components["algo"].options.lr == 0.1
    assert plain.config.components["algo"].options.lr == 0.005  # of the preset
    assert none.parameters < plain.parameters < wide.parameters
    assert make_trials(found, Path("f"))[0].config.training.eval_at_end == 7


def test_variants_and_grid_are_combined() -> None:
    found = study("""
        seeds = [1]
        [grid]
        env = ["toy/bandit", "toy/chain"]
        [[variant]]
        name = "slow"
        lr = 0.001
        [[variant]]
        name = "fast"
        lr = 0.01
        [normalise]
        "toy/bandit" = [0.5, 1]
        "toy/chain" = [0, 1]
        """)
    assert [(v.name, v.name_without_env) for v in found.variants] == [
        ("slow,env=toy-bandit", "slow"),
        ("slow,env=toy-chain", "slow"),
        ("fast,env=toy-bandit", "fast"),
        ("fast,env=toy-chain", "fast"),
    ]


def test_normalise_accepts_relative_paths_of_plug_ins() -> None:
    """Variants name the environment by the absolute path of its file."""
    Path("own.py").write_text(OWN)
    trust.trust_named(PluginRef(Path("own.py"), "Own"))
    found = study("""
        seeds = [1]
        [base]
        env = "own.py:Own"
        [normalise]
        "own.py:Own" = [0, 4]
        """)
    assert found.normalise == {f"{Path('own.py').resolve()}:Own": (0.0, 4.0)}


def test_variant_with_its_own_grid_and_stages() -> None:
    found = study("""
        seeds = [1, 2]
        [base]
        steps = 500
        [[variant]]
        name = "first"
        env = "toy/chain"
        [[variant]]
        name = "single"
        grid = { env = ["toy/chain", "toy/catch"], lr = [0.1] }
        [[variant]]
        name = "second"
        after = "first"
        env = "toy/chain"
        lr = 0.1
        """)
    names = ["first", "single,env=toy-chain,lr=0.1", "single,env=toy-catch,lr=0.1", "second"]
    assert [variant.name for variant in found.variants] == names
    assert [variant.name_without_env for variant in found.variants][1:3] == ["single,lr=0.1"] * 2
    trials = make_trials(found, Path("f"))
    assert [trial.config.training.init_from for trial in trials] == [*[None] * 6, "f/first-s1", "f/first-s2"]
    assert trials[-1].predecessor is trials[1]
    assert trials[-1].is_blocked
    assert trials[-1].state().text == "missing, starts after first-s2"


def test_scale_overrides_all_tables_and_names_the_study() -> None:
    text = """
        name = "s"
        seeds = [1, 2]
        evaluate = 9
        [base]
        env = "toy/chain"
        steps = 500
        [grid]
        lr = [0.1, 0.2, 0.3]
        [[variant]]
        name = "a"
        steps = 700
        [[variant]]
        name = "b"
        num_envs = 8
        [[analysis]]
        tool = "actions"
        episodes = 50
        [[analysis]]
        tool = "filters"
        points = 10
        [scale.small]
        seeds = [3]
        evaluate = 2
        grid = { lr = [0.1] }
        analysis = { episodes = 5 }
        [scale.small.options]
        steps = 100
        [scale.small.variant.b]
        steps = 200
        """
    assert len(study(text).variants) == 6
    small = read_study(Path("s.toml"), scale="small")
    assert (small.name, small.seeds) == ("s-small", (3,))
    assert [(v.name, v.config.training.steps) for v in small.variants] == [("a,lr=0.1", 100), ("b,lr=0.1", 200)]
    assert [plan.episodes for plan in small.evaluations] == [2]
    assert [analysis.options for analysis in small.analyses] == [{"episodes": 5}, {"points": 10}]
    with pytest.raises(UserError, match=r"--scale smal: .*did you mean small"):
        read_study(Path("s.toml"), scale="smal")


def test_study_with_seeds_only_has_one_variant() -> None:
    assert [variant.name for variant in study('seeds = [1, 2]\n[base]\nenv = "toy/bandit"\n').variants] == ["base"]


HEAD = 'seeds = [1]\n[base]\nenv = "toy/chain"\n'
MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ('zoom = "4M:2M"\n' + HEAD, ("s.toml, line 1: zoom = '4M:2M': expected a range",)),
    ('dashed = ["bas"]\n' + HEAD, ("s.toml, line 1: there is no variant bas; did you mean base?",)),
    (HEAD + "lerning_rate = 3\nlr = 0.1", ("s.toml, line 4: unknown option --lerning-rate",)),
    (HEAD + "rollout_lenght = 3", ("s.toml, line 4: unknown option --rollout-lenght; did you mean --rollout-length",)),
    (HEAD + '\n[base.memory]\nname = "gru"\nhiden = 3', ("line 7: unknown option --memory.hiden; did you mean",)),
    (HEAD + "[grid]\nlr = [0.1]\nframe-stak = [1, 2]", ("line 6: unknown option --frame-stak",)),
    (
        HEAD + '[[variant]]\nname = "a"\n[[variant]]\nname = "b"\nstep = 3',
        ("line 8: unknown option --step;", "(variant b)"),
    ),
    (
        HEAD + '[grid]\nmemory = ["none", "lstm"]\n"memory.hidden" = [8]',
        ("line 6: unknown option --memory.hidden", "none"),
    ),
    (HEAD + "steps = 0", ("s.toml, line 4: --steps 0: must be at least 1",)),
    (HEAD + "algo.lr = 'x'", ("s.toml, line 4: --lr x: expected a number",)),
    (HEAD + "num_envs = 1\npools = 2", ("s.toml, line 4: --num-envs 1: each of the 2 pools needs",)),
    (HEAD + 'device = "gpu"', ("s.toml, line 4: --device gpu: expected auto",)),
    (HEAD + 'torso = "shallow"', ("needs an image",)),
    (HEAD + 'preset = "helo"', ("s.toml, line 4: --preset helo", "did you mean hello?")),
    (HEAD + 'config = "missing.toml"', ("s.toml, line 4: missing.toml: no such file",)),
    (HEAD + "seed = 4", ("s.toml, line 4: seed: use seeds = [...]",)),
    (HEAD + "[grid]", ("s.toml, line 4: the grid is empty",)),
    (HEAD + "[grid]\nlr = []", ("s.toml, line 5: grid lr = []: expected a list of values",)),
    (HEAD + "[grid]\nlr = 3", ("s.toml, line 5: grid lr = 3: expected a list of values",)),
    (HEAD + "[grid]\nlr = [1, 2, 1]", ("s.toml, line 5: grid lr=1 is listed twice",)),
    (HEAD + "[grid]\nlr = [0.1, '0.10']", ("lr=0.1 and lr=0.10 have the same configuration",)),
    (HEAD + '[[variant]]\nname = "a"\n[[variant]]\nname = "A"', ("s.toml, line 7: two variants have the name a",)),
    (HEAD + '[[variant]]\nname = "a"\n[[variant]]\nname = "b"', ("variants a and b have the same configuration",)),
    (HEAD + "[[variant]]\nlr = 3", ("s.toml, line 4: this [[variant]] has no name",)),
    (HEAD + '[[variant]]\nname = "../a"', ("s.toml, line 5: name = '../a'",)),
    (HEAD + '[variant]\nname = "a"', ("s.toml, line 4: variant: expected [[variant]]",)),
    (HEAD + '[normalise]\n"toy/chain" = [1, 1]', ("s.toml, line 5: toy/chain = [1, 1]: expected the returns",)),
    (HEAD + '[normalise]\n"toy/chian" = [0, 1]', ("[normalise] has no entry for toy/chain",)),
    ('seeds = [1]\n[base]\nenv = "toy/chian"', ("s.toml, line 3: toy/chian: unknown toy", "did you mean chain")),
    ('seeds = [1]\n[base]\nenv = "chain"', ("s.toml, line 3: unknown environment chain",)),
    ("seeds = [1]\nbase = 3", ("s.toml, line 2: base: expected a table [base]",)),
    ("seeds = [1]\n", ("s.toml: no environment given",)),
    ('seeds = [2, 3, 2]\n[base]\nenv = "toy/chain"', ("s.toml, line 1: seed 2 is listed twice",)),
    ('seeds = [2, -1]\n[base]\nenv = "toy/chain"', ("s.toml, line 1: seeds: -1: expected an integer",)),
    ('seeds = []\n[base]\nenv = "toy/chain"', ("s.toml, line 1: seeds: expected a list",)),
    ('[base]\nenv = "toy/chain"', ("s.toml: seeds: expected a list",)),
    ("\nsead = 3\n" + HEAD, ("s.toml, line 2: unknown key sead; did you mean seeds",)),
    ('name = "a/b"\n' + HEAD, ("s.toml, line 1: name = 'a/b'",)),
    ("evaluate = -1\n" + HEAD, ("s.toml, line 1: evaluate = -1: expected a number of games",)),
    (HEAD + '[[variant]]\nname = "a"\nafter = "b"', ("s.toml, line 6: after = 'b': the file has no variant b above",)),
    (
        HEAD + "[[evaluate]]\nepisode = 3",
        ("s.toml, line 5: unknown key episode of an evaluation; did you mean episodes",),
    ),
    (HEAD + "[[evaluate]]\nlevels = ['0:9']", ("s.toml, line 5: levels 0:9: toy/chain has no levels",)),
    (HEAD + "[[evaluate]]\nenv = ['warehouse']", ("s.toml, line 5: --env warehouse: the agent was trained on",)),
    (HEAD + "[[evaluate]]\nvariants = ['bas']", ("s.toml, line 5: there is no variant bas; did you mean base",)),
    (HEAD + '[[analysis]]\ntool = "filter"', ("s.toml, line 5: tool = 'filter'", "did you mean filters")),
    (HEAD + '[[analysis]]\ntool = "actions"\nepisode = 3', ("line 6: unknown key episode", "did you mean episodes")),
    (HEAD + '[[analysis]]\ntool = "audit"\nepisodes = "3"', ("line 6: episodes = '3': expected an integer",)),
    (HEAD + '[[published]]\ntitle = "t"\nsource = "x"\n[published.values.bas]\na = 1', ("there is no variant bas",)),
    (
        HEAD + '[[published]]\ntitle = "t"\nsource = "x"\n[published.values.base]\na = [1]',
        ("line 8: a = [1]: expected",),
    ),
    (
        HEAD + "[scale.small.option]\nsteps = 3",
        ("s.toml, line 4: unknown key option of a scale; did you mean options",),
    ),
    ("seeds = = 3", ("s.toml: not a valid TOML file", "line 1")),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[expected[0] for _, expected in MISTAKES])
def test_wrong_files_are_refused_with_the_line_before_any_run(
    text: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.toml").write_text(text)
    assert run_command(["study", "s.toml"]) == 2
    errors = capsys.readouterr().err
    for phrase in expected:
        assert phrase in errors
    assert all(line.startswith("bestiary: ") for line in errors.strip().splitlines()), errors
    assert [path.name for path in Path().iterdir()] == ["s.toml"]


def test_all_problems_are_reported_together_each_once() -> None:
    with pytest.raises(UserError) as error:
        study(HEAD + 'tims = 3\n[[variant]]\nname = "a"\nlr = "x"\n[[variant]]\nname = "b"\nsteps = 0\n')
    assert [problem.split(": ")[0] for problem in error.value.problems] == [f"s.toml, line {n}" for n in (4, 7, 10)]


def test_unreadable_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, phrase in (
        ("no.toml", "no such file"),
        ("folder", "cannot be read"),
        ("binary.toml", "not a valid TOML file"),
    ):
        assert run_command(["study", name]) == 2
        assert f"{name}: " in (errors := capsys.readouterr().err)
        assert phrase in errors
