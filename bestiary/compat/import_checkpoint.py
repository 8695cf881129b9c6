"""Convert a checkpoint of TorchBeast or of a fork to a run folder, which all commands can use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bestiary.agents.critics import WARMUP_UPDATES
from bestiary.compat.checkpoint_file import OriginalCheckpoint, read_checkpoint, read_meta
from bestiary.compat.import_logs import read_logs
from bestiary.compat.import_options import make_config
from bestiary.compat.original_networks import Network, UnknownNetwork, identify
from bestiary.config.config import Config
from bestiary.runs import checkpoints
from bestiary.runs.csv_tables import CsvTable
from bestiary.runs.run import Run, RunLocation, create_run
from bestiary.training.clipped_optimizer import describe_tensor
from bestiary.training.factory import make_learner
from bestiary.training.learner import Learner
from bestiary.training.session import Session
from bestiary.utils.console import note
from bestiary.utils.errors import UserError

STATISTICS = ("baseline.mu", "baseline.sigma")  # buffers of the PopArt layer; all other tensors are parameters


def import_checkpoint(
    path: Path,
    location: RunLocation = RunLocation(),
    meta: Path | None = None,
    logs: Path | None = None,
    envs: Sequence[str] = (),
) -> Run:
    """Create a run folder from a checkpoint of TorchBeast or of one of its forks, and return the run.

    Args:
        path: the checkpoint, for example model.tar.
        location: place of the run folder.
        meta: file meta.json of the original run, for flags that the checkpoint does not contain.
        logs: file logs.csv of the original run, which becomes metrics.csv.
        envs: names of the environments of the training, if they are not in the flags.

    Raises:
        UserError: a file cannot be read, or the network cannot be imported. In this case nothing is written.
    """
    original = read_checkpoint(path)
    flags = {**(read_meta(meta) if meta is not None else {}), **original.contents.flags}
    try:
        network = identify(original.weights, bool(flags.get("use_popart")), flags.get("use_no_carry_sr", False) is True)
    except UnknownNetwork as error:
        raise UserError(f"{path} cannot be imported: {error}") from error
    config = make_config(path, flags, network, envs)
    steps, updates = _count_steps(original, config)
    # The sizes in the file are not checked yet and may be huge. Tensors of the device "meta" use no memory.
    with torch.device("meta"):
        expected = config.make_agent().state_dict()
    weights = translate_weights(original, network, expected, updates)
    learner = make_learner(config, config.make_agent(), torch.device("cpu"))
    counters = {"steps": steps, "version": updates, "skipped_updates": 0}
    optimizer, problem = translate_optimizer(original, network, learner)
    try:
        learner.load({"model": weights, "optimizer": optimizer, "algorithm": {}}, counters)
    except UserError as error:
        problem = error.problems[-1]
        learner.load({"model": weights, "optimizer": {}, "algorithm": {}}, counters)
    rows = read_logs(logs, config) if logs is not None else []
    run, exists = create_run(config, location, source=path)
    assert not exists, "the command does not offer to resume an existing run"
    _write(run, config, learner, rows)
    note(f"{path}: {network.description}, {steps} steps -> {run.shown_path}")
    for line in _differences(config, original, flags, problem):
        note(f"note: {line}")
    return run


def _count_steps(original: OriginalCheckpoint, config: Config) -> tuple[int, int]:
    """Return the number of steps and of updates. MonoBeast stores only the number of updates."""
    options = config.components["algo"].options
    steps_per_update = options.batch_size * options.rollout_length
    steps, updates = original.contents.steps, original.contents.updates
    if steps is None:
        steps = (updates or 0) * steps_per_update
    if updates is None:
        updates = steps // steps_per_update
    return min(steps, 10**12 - 1), updates  # the name of a checkpoint has 12 digits


def translate_weights(
    original: OriginalCheckpoint, network: Network, expected: Mapping[str, Tensor], updates: int
) -> dict[str, Tensor]:
    """Return a state dict for the agent. Its values are the weights of a checkpoint.

    `expected` are tensors with the names, shapes and types of the agent's state dict.

    Raises:
        UserError: a tensor is missing, has another shape than in the agent, or has values that are not finite.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in original.weights.items():
        row = network.translate(name)
        own_name = row.match(name) if row is not None else None
        if row is not None and own_name:
            found[own_name] = row.convert(tensor)
    if network.critic == "popart":
        mu, sigma = found["critic.mu"].double(), found["critic.sigma"].double()
        found |= {"critic.mu": mu, "critic.sigma": sigma, "critic.nu": sigma.square() + mu.square()}
        found["critic.updates"] = torch.full_like(mu, max(updates, WARMUP_UPDATES))
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape:
            shapes = f"{describe_tensor(found.get(name))} in the file, {describe_tensor(tensor)} expected"
            raise UserError(f"{original.path} cannot be imported: the tensor for {name} is {shapes}")
        found[name] = found[name].to(tensor.dtype)
        if not bool(found[name].isfinite().all()):
            raise UserError(f"{original.path} cannot be imported: the values of the tensor for {name} are not finite")
    if extra := found.keys() - expected.keys():
        raise UserError(f"{original.path} cannot be imported: the agent has no tensor {', '.join(sorted(extra)[:4])}")
    return {name: found[name] for name in expected}


def translate_optimizer(
    original: OriginalCheckpoint, network: Network, learner: Learner
) -> tuple[dict[str, Tensor], str]:
    """Return the state of the optimizer for this learner, and "".

    If the state cannot be used, return {} and the reason.

    The optimizer identifies parameters by their indices, which differ between the original and Bestiary. Therefore each
    index is translated: index in the original -> original name -> name in Bestiary -> index in Bestiary.
    """
    parameters = [name for name in original.weights if name not in STATISTICS]
    if not original.optimizer:
        return {}, "the file has none"
    if original.contents.num_optimized != len(parameters):
        return {}, f"it has {original.contents.num_optimized} parameters, the network has {len(parameters)}"
    indices = {name: index for index, name in enumerate(dict(learner.agent.named_parameters()))}
    state = {}
    for key, value in original.optimizer.items():
        position, _, kind = key.partition(".")
        name = parameters[int(position)]
        row = network.translate(name)
        own_name = row.match(name) if row is not None else None
        if row is not None and own_name:
            state[f"{indices[own_name]}.{kind}"] = (row.convert(value) if value.dim() else value).float()
    return state, ""


def _write(run: Run, config: Config, learner: Learner, rows: list[dict[str, Any]]) -> None:
    """Write the checkpoint and metrics.csv of an imported run."""
    with run.lock():
        CsvTable(run.path / "metrics.csv").write(rows)
        state = Session(run, config, learner, dict, []).save()
        state["seconds"] = rows[-1]["seconds"] if rows else 0.0
        state["callbacks"]["metrics"] = {
            "rows": {"metrics": len(rows), "episodes": 0},
            "log_intervals": learner.steps // config.training.log_every,
            "pending": [],
        }
        checkpoints.write_checkpoint(run.path / "checkpoints", learner.steps, learner.save(), {}, state)


def _differences(config: Config, original: OriginalCheckpoint, flags: Mapping[str, Any], problem: str) -> list[str]:
    """Return one line for each part of the original run that is not imported or that behaves differently."""
    lines = []
    if not flags:
        lines.append(
            "the file contains no flags, so the training options are the defaults of the original; to change this, add "
            "--meta meta.json"
        )
    if problem:
        lines.append(f"the state of the optimizer is not imported ({problem}); resume starts with a new optimizer")
    if original.contents.steps is None and original.contents.updates is None:
        lines.append("the file contains no number of steps; the checkpoint is saved as step 0")
    if config.envs[0].startswith("atari/"):
        lines.append(
            "the start of a life and the end at the time limit differ slightly from the original (docs/atari.md)"
        )
    lines.append("states of environments and random generators are not in the file; resume starts new episodes")
    lines.append("training options are translated as by bestiary compat; docs/migration.md lists the differences")
    return lines
