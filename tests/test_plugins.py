"""Parts from the user's own files: found, checked and refused before any work starts."""

import sys
import textwrap

import pytest
import torch

from bestiary import plugins
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.runs.folder import Place, create_run, open_run
from bestiary.runtime.build import build
from bestiary.runtime.train import start
from bestiary.textconfig import read_toml

GOOD = """
    import torch.nn as nn

    class Net(nn.Module):
        def __init__(self, spec, *, width: int = 32, scale=1.5):
            super().__init__()
            self.layer = nn.Linear(spec["vector"].shape[0], width)
            self.output_size, self.scale = width, scale

        def forward(self, observation):
            return self.scale * self.layer(observation["vector"])
"""

WITH_OPTIONS = """
    from dataclasses import dataclass
    import torch.nn as nn
    from bestiary.options import option

    class Net(nn.Module):
        @dataclass(frozen=True)
        class Options:
            width: int = option(32, "units", low=1, high=64)

        def __init__(self, spec, options=Options()):
            super().__init__()
            self.layer = nn.Linear(spec["vector"].shape[0], options.width)
            self.output_size = options.width

        def forward(self, observation):
            return self.layer(observation["vector"])
"""

MEMORY = """
    import torch
    import torch.nn as nn

    class Sum(nn.Module):
        def __init__(self, input_size):
            super().__init__()
            self.output_size = input_size

        def initial_state(self, batch_size):
            return (torch.zeros(batch_size, self.output_size),)

        def forward(self, x, done, state):
            outputs, (total,) = [], state
            for t in range(len(x)):
                total = torch.where(done[t][:, None], 0.0, total) + x[t]
                outputs.append(total)
            return torch.stack(outputs), (total,)
"""

AGENT = """
    import torch
    import torch.nn as nn
    from bestiary.agents.agent import Output
    from bestiary.agents.heads import Categorical

    class Linear(nn.Module):
        def __init__(self, observation, action):
            super().__init__()
            self.head = nn.Linear(observation["vector"].shape[0], action.n + 1)

        def initial_state(self, batch_size):
            return ()

        def forward(self, inputs, state):
            x = self.head(inputs.observation["vector"])
            return Output(Categorical(x[..., 1:]), x[..., 0]), state
"""


@pytest.fixture
def write(tmp_path):
    def write(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write


def with_torso(path, name="Net", **options):
    return {"env": "toy/chain", "torso": f"{path}:{name}", "steps": 100, "num_envs": 2, "batch_size": 2, **options}


def refusal(function, *args):
    with pytest.raises(UserError) as error:
        function(*args)
    return "\n".join(error.value.problems)


def make_agent(given):
    config = resolve(given)
    pool = config.make_pool(1, 0)
    return config.make_agent(pool)


# --- names ---


@pytest.mark.parametrize("name", ["a.py:B", "/x/y/a.py:B", "~/a.py:B", "c:/x/a.py:B_2"])
def test_is_plugin(name):
    assert plugins.is_plugin(name)


@pytest.mark.parametrize("name", ["lstm", "toy/catch", "a.py", "a.py:", "a.txt:B", "a.py:2b", "a.py:B c", ":B"])
def test_is_no_plugin(name):
    assert not plugins.is_plugin(name)


# --- what works ---


def test_keyword_only_arguments_become_options(write):
    agent = make_agent(with_torso(write(GOOD), **{"torso.width": "8", "torso.scale": "0.5"}))
    assert (agent.torso.output_size, agent.torso.scale) == (8, 0.5)
    assert make_agent(with_torso(write(GOOD))).torso.output_size == 32


def test_options_dataclass_works_as_well(write):
    path = write(WITH_OPTIONS)
    assert make_agent(with_torso(path, **{"torso.width": "8"})).torso.output_size == 8
    assert "--torso.width 65: must be at most 64" in refusal(resolve, with_torso(path, **{"torso.width": 65}))


@pytest.mark.parametrize("default", ["(16, 32)", "[16, 32]", "None"])
def test_keyword_defaults_without_annotation_survive_the_config_file(write, tmp_path, default):
    """What resolve accepts it must accept again from the config.toml of the run's folder."""
    source = (
        GOOD.replace("scale=1.5", f"sizes={default}").replace("self.scale", "self.sizes").replace(", scale", ", sizes")
    )
    source = source.replace("self.sizes * ", "")
    config = resolve(with_torso(write(source)))
    (tmp_path / "config.toml").write_text(config.to_toml())
    again = resolve(read_toml(tmp_path / "config.toml"))
    assert again.to_toml() == config.to_toml()


def test_equal_configs_are_equal(write):
    given = with_torso(write(GOOD))
    assert resolve(given) == resolve(given)
    assert resolve(given) != resolve({**given, "torso.width": 8})


@pytest.mark.parametrize(
    ("kind", "name", "source"), [("torso", "Net", GOOD), ("memory", "Sum", MEMORY), ("agent", "Linear", AGENT)]
)
def test_a_plugin_trains(write, kind, name, source):
    path = write(source)
    config = resolve(
        {"env": "toy/chain", kind: f"{path}:{name}", "steps": 100, "num_envs": 2, "batch_size": 2, "runtime": "serial"}
    )
    (actor,), learner = build(config)
    actor.start()
    before = [p.detach().clone() for p in learner.parameters]
    learner.learn([actor.collect()])
    assert learner.skipped == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))


def test_name_becomes_absolute(write, tmp_path, monkeypatch):
    write(GOOD)
    monkeypatch.chdir(tmp_path)
    config = resolve(with_torso("mine.py"))
    assert config.parts["torso"].name == f"{tmp_path}/mine.py:Net"
    assert config.plugin_hashes == {f"{tmp_path}/mine.py": plugins.digest(tmp_path / "mine.py")}
    assert config.label() == "chain-Net"


def test_changed_file_is_imported_anew(write):
    first = plugins.load(f"{write(GOOD)}:Net", "torso")
    second = plugins.load(f"{write(GOOD + '    marker = 1')}:Net", "torso")
    assert first is not second
    assert plugins.load(f"{write(GOOD)}:Net", "torso") is first


# --- what does not ---


def test_missing_file(tmp_path):
    text = refusal(resolve, with_torso(tmp_path / "none.py"))
    assert text == f"{tmp_path}/none.py:Net: there is no file {tmp_path}/none.py"


def test_missing_name_has_a_suggestion(write):
    text = refusal(resolve, with_torso(write(GOOD), "Nte"))
    assert "mine.py has no Nte; did you mean Net?" in text


def test_syntax_error_names_the_line(write):
    path = write("import torch\n\nclass Net(:\n    pass\n")
    text = refusal(resolve, with_torso(path))
    assert text.startswith(f"{path}, line 3: does not import: SyntaxError")


@pytest.mark.parametrize("line", ["import no_such_module", "1 / 0", "raise SystemExit(3)"])
def test_file_that_does_not_import(write, line):
    modules = set(sys.modules)
    path = write(line + "\n")
    assert refusal(resolve, with_torso(path)).startswith(f"{path}: does not import: ")
    assert not any(name.startswith("bestiary_plugin_") for name in set(sys.modules) - modules)


def test_lacking_a_method(write):
    source = MEMORY.replace("initial_state", "first_state")
    text = refusal(resolve, {"env": "toy/chain", "memory": f"{write(source)}:Sum"})
    assert "not a usable memory: Sum lacks initial_state" in text


def test_not_a_class(write):
    text = refusal(plugins.load, f"{write('value = 5')}:value", "torso")
    assert "not a usable torso: value is not a class or function" in text


def test_missing_output_size(write):
    source = GOOD.replace("self.output_size, self.scale = width, scale", "self.scale = scale")
    text = refusal(make_agent, with_torso(write(source)))
    assert "not a usable torso: it sets no self.output_size" in text


def test_required_argument_without_default(write):
    text = refusal(make_agent, with_torso(write(GOOD.replace("width: int = 32", "width: int"))))
    assert "cannot be made: TypeError" in text
    assert "width" in text


def test_constructor_that_fails(write):
    """The likeliest mistake: a torso for pictures on an environment without one."""
    text = refusal(make_agent, with_torso(write(GOOD.replace('spec["vector"]', 'spec["image"]'))))
    assert "cannot be made: KeyError" in text


def test_agent_whose_constructor_fails(write):
    path = write(AGENT.replace("observation, action):", "observation):"))
    text = refusal(make_agent, {"env": "toy/chain", "agent": f"{path}:Linear"})
    assert "cannot be made: TypeError" in text


def test_option_of_a_part_that_the_agent_does_not_have(write):
    text = refusal(resolve, {"env": "toy/chain", "agent": f"{write(AGENT)}:Linear", "memory": "lstm"})
    assert text.startswith("unknown option --memory")


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [
        ("torso", "Net", GOOD.replace("return self.scale * self.layer", "return self.layer.weight.sum() + 0 * ")),
        (
            "torso",
            "Net",
            GOOD.replace("self.output_size, self.scale = width", "self.output_size, self.scale = width + 1"),
        ),
        ("torso", "Net", GOOD.replace("def forward", "def backward")),
        ("memory", "Sum", MEMORY.replace("return torch.stack(outputs), ", "return outputs[-1], ")),
        ("memory", "Sum", MEMORY.replace("torch.stack(outputs)", "torch.stack(outputs, dim=1)")),
    ],
    ids=["not width", "not output_size", "no forward", "only the last step", "batch before time"],
)
def test_wrong_output_is_found_before_work_starts(write, tmp_path, kind, name, source):
    path = write(source)
    given = {"env": "toy/chain", kind: f"{path}:{name}", "steps": 100}
    place = Place(run_dir=str(tmp_path / "run"))
    text = refusal(start, resolve(given), place)
    assert "on a batch of 2 steps x 3" in text
    assert not (tmp_path / "run").exists()


# --- run folders and trust ---


@pytest.fixture
def folder(write, tmp_path):
    """A run folder of a plug-in, and the plug-in's file."""
    path = write(GOOD)
    run, _ = create_run(resolve(with_torso(path)), Place(run_dir=str(tmp_path / "run")))
    return run.path, path


def test_unchanged_original_is_used(folder):
    run, path = folder
    assert open_run(run).config.parts["torso"].name == f"{path}:Net"


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_changed_original_is_refused(folder, change):
    run, path = folder
    if change == "edited":
        path.write_text(path.read_text() + "\nraise AssertionError('this must not be imported')\n")
    else:
        path.unlink()
    text = refusal(lambda: open_run(run).config)
    assert ("has changed since" if change == "edited" else "is no longer there") in text
    assert "--trust-code" in text


def test_trusted_copy_is_used(folder):
    run, path = folder
    path.unlink()
    config = open_run(run, trust_code=True).config
    copied, attribute = plugins.split(config.parts["torso"].name)
    assert copied.parent.resolve() == (run / "plugins").resolve()
    assert attribute == "Net"
    pool = config.make_pool(1, 0)
    agent = config.make_agent(pool)
    assert agent.state_dict()["torso.layer.weight"].shape[0] == 32


def test_altered_copy_is_refused_even_if_trusted(folder):
    run, path = folder
    path.unlink()
    (copy,) = (run / "plugins").iterdir()
    copy.write_text(copy.read_text() + "\n# altered\n")
    assert "missing or altered" in refusal(lambda: open_run(run, trust_code=True).config)


def test_file_that_the_folder_does_not_know(tmp_path):
    text = refusal(plugins.resolve_trusted, f"{tmp_path}/other.py:Net", tmp_path, {}, True)
    assert "no record of this file" in text


def test_copies_of_equal_names_do_not_collide(tmp_path):
    path = tmp_path / "mine.py"
    assert plugins.copy_name(path, "a" * 64) != plugins.copy_name(path, "b" * 64)
    assert plugins.copy_name(path, "a" * 64) == "mine-aaaaaaaa.py"


def test_a_plugin_imports_the_files_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 7\n")
    (tmp_path / "net.py").write_text("from beside import SIZE\nclass Net:\n    size = SIZE\n")
    assert plugins.load(f"{tmp_path}/net.py:Net", "torso").size == 7
