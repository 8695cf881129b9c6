"""Flags of TorchBeast and of its forks.

`FLAGS` contains all flags of MonoBeast and PolyBeast in all forks, except the fork for ProcGen. `LEARNER_FLAGS` is
the part of `FLAGS` that the fork for ProcGen also has.
"""

import os

from bestiary.compat.flag_types import IGNORED, JOINT, REFUSED, Flag

# Bestiary commands for which a flag matters (Flag.commands).
PLAY = ("eval", "video")
ALL_COMMANDS = ("train", *PLAY, "audit")
LEARNER_THREADS = "not needed: the number of threads that compute gradients is chosen automatically (--learner-threads)"
ACTOR_THREADS = "not needed: the number of threads that choose actions is chosen automatically (--actor-threads)"
WAITING_ROLLOUTS = (
    "not needed: the maximum policy lag limits the number of rollouts that wait for the learner (--max-lag)"
)


def expand_path(path: str) -> str:
    """Return a path in which `~` and environment variables are expanded, as the originals do."""
    return os.path.expandvars(os.path.expanduser(path))


LEARNER_FLAGS = (
    Flag("total_steps", 100_000, "--steps", kind=int, defaults={"popart-poly": 10_000_000}),
    Flag("batch_size", 8, "--batch-size", kind=int),
    Flag("unroll_length", 80, "--rollout-length", kind=int),
    Flag("entropy_cost", 0.0006, "--algo.entropy-coef", kind=float, defaults={"popart-poly": 0.01}),
    Flag("baseline_cost", 0.5, "--algo.value-coef", kind=float),
    Flag("discounting", 0.99, "--algo.discount", kind=float),
    Flag("reward_clipping", "abs_one", "--algo.reward-clipping", choices=("abs_one", "soft_asymmetric", "none")),
    Flag("learning_rate", 0.00048, "--lr", kind=float),
    Flag("alpha", 0.99, "--algo.alpha", kind=float),
    Flag("momentum", 0.0, "--algo.momentum", kind=float),
    Flag("epsilon", 0.01, "--algo.eps", kind=float, defaults={"reward": 1e-4}),
    Flag("grad_norm_clipping", 40.0, "--algo.max-grad-norm", kind=float),
    Flag("disable_cuda", False, "--device cpu", kind=bool),
    Flag(
        "disable_checkpoint",
        False,
        "--save-minutes 1000000000",
        "one checkpoint is still written, at the end of the training",
        kind=bool,
    ),
    Flag("num_learner_threads", 2, "", LEARNER_THREADS, IGNORED, int),
    Flag("num_inference_threads", 2, "", ACTOR_THREADS, IGNORED, int),
    Flag("max_learner_queue_size", None, "", WAITING_ROLLOUTS, IGNORED, int),
    Flag(
        "pipes_basename",
        "unix:/tmp/polybeast",
        "",
        "not needed on one machine; several machines are connected by --cluster HOST:PORT (docs/cluster.md)",
        IGNORED,
    ),
    Flag("num_actions", 6, "", "not needed: the environment states its actions", IGNORED, int),
    Flag(
        "write_profiler_trace",
        False,
        "",
        "not available: bestiary bench measures the parts of the training, without a Chrome trace",
        IGNORED,
        bool,
    ),
)

FLAGS = (
    Flag("mode", "train", "the commands `train`, `eval`, `video`, `audit`", status=JOINT, commands=ALL_COMMANDS),
    Flag(
        "env",
        "PongNoFrameskip-v4",
        "ENV, for example `atari/Pong`; for a test `--env ENV`",
        status=JOINT,
        commands=ALL_COMMANDS,
    ),
    Flag(
        "xpid",
        None,
        "last part of `--run-dir SAVEDIR/XPID`, or of RUN",
        status=JOINT,
        commands=ALL_COMMANDS,
    ),
    Flag(
        "savedir",
        "~/logs/torchbeast",
        "first part of `--run-dir SAVEDIR/XPID`, or of RUN",
        status=JOINT,
        defaults={"popart-poly": "./logs/torchbeast-local", "poly": "~/palaas/torchbeast"},
        commands=ALL_COMMANDS,
    ),
    Flag(
        "num_actors",
        4,
        "`--num-envs`",
        status=JOINT,
        kind=int,
        defaults={"popart-poly": 16},
    ),
    Flag(
        "num_servers",
        4,
        "polybeast_env: `--cluster local --actors N`; otherwise not needed: there are as many environments as actors",
        status=JOINT,
        kind=int,
        defaults={"popart-poly": 16},
    ),
    Flag("start_servers", True, "", "not needed: the training starts its environments", IGNORED, bool),
    Flag("no_start_servers", False, "", "not needed: the training starts its environments", IGNORED, bool),
    *LEARNER_FLAGS,
    Flag("num_buffers", None, "", WAITING_ROLLOUTS, IGNORED, int),
    Flag("num_threads", 2, "", LEARNER_THREADS, IGNORED, int),
    Flag(
        "use_lstm",
        False,
        "`--memory lstm`; torso `shallow`: `--memory.layers 2` and `--memory.hidden` = width of the torso + 1 + number "
        "of actions; torso `resnet`: `--memory.layers 1 --memory.hidden 256`",
        status=JOINT,
        kind=bool,
    ),
    # PopArt fork
    Flag(
        "use_popart", False, "`--critic popart` with the statistics of the fork", status=JOINT, kind=bool, fork="popart"
    ),
    Flag(
        "beta",
        1e-4,
        "",
        "ignored, as in the fork, which always uses 4e-4; to change it, add --critic.beta to the printed command",
        IGNORED,
        float,
        fork="popart",
    ),
    Flag(
        "save_model_every_nsteps",
        0,
        "`--save-every`; if it is not 0, also `--keep-at 0` (untrained agent)",
        status=JOINT,
        kind=int,
        fork="popart",
    ),
    Flag(
        "intermediate_model_id",
        None,
        "--checkpoint",
        "the checkpoint nearest to this number of steps",
        fork="popart",
        convert=lambda model_id: str(int(model_id)),
        commands=PLAY,
    ),
    Flag(
        "num_episodes",
        10,
        "`--episodes`",
        "number of whole games; in the original, number of lives (a game of River Raid has 4 lives). The audit of the "
        "reward fork plays 15 times as many lives as this flag says",
        JOINT,
        int,
        defaults={"popart": 100},
        commands=("eval", "audit"),
    ),
    Flag(
        "actions",
        None,
        "",
        "a text file of actions cannot be replayed; record games with bestiary eval RUN --record and draw them with "
        "bestiary video RUN --replay recordings/NAME.json",
        REFUSED,
        fork="popart",
        commands=PLAY,
    ),
    Flag(
        "agent_type",
        "resnet",
        "`--torso resnet`, `--agent aaa` or `--torso shallow`",
        status=JOINT,
        defaults={"popart-mono": "resnet", "mono": "cnn"},
        fork="popart",
    ),
    Flag("frame_height", 84, "`--frame-size HEIGHTxWIDTH`", status=JOINT, kind=int, fork="popart"),
    Flag("frame_width", 84, "`--frame-size HEIGHTxWIDTH`", status=JOINT, kind=int, fork="popart"),
    Flag(
        "aaa_input_format",
        "gray_stack",
        "gray_stack: `--gray on`; rgb_stack: `--gray off`; rgb_last: `--gray off --frame-stack 1`",
        "applies to every agent, not only to the attention-augmented agent",
        JOINT,
        choices=("gray_stack", "rgb_last", "rgb_stack"),
        fork="popart",
    ),
    Flag("multitask", False, "", "not needed: each game of --env is a task", IGNORED, bool, fork="popart"),
    # Reward-misspecification fork
    Flag(
        "fuel_multiplier",
        1.0,
        "F >= 0 and F != 1: `--reward fuel:F`; F < 0: `--reward pacifist:|F|`; F = 1: see move_penalty",
        status=JOINT,
        kind=float,
        fork="reward",
    ),
    Flag(
        "move_penalty",
        0.0,
        "if fuel_multiplier is 1: M >= 0: `--reward smooth:M`; M < 0: `--reward center:|M|`",
        status=JOINT,
        kind=float,
        fork="reward",
    ),
    Flag(
        "true_move_penalty",
        0.0,
        "T > 0: `--true-reward 'score=1; smooth:T'`; T < 0: `--true-reward 'score=1; center:|T|'`",
        status=JOINT,
        kind=float,
        fork="reward",
    ),
    Flag("hidden_size", 512, "--torso.width", kind=int, fork="reward", status=JOINT),
    Flag("num_layers", 1, "--torso.depth", kind=int, fork="reward", status=JOINT),
    Flag("beta1", 0.9, "", "not used, as in the fork, whose optimizer is RMSProp", IGNORED, float, fork="reward"),
    Flag("beta2", 0.999, "", "not used, as in the fork, whose optimizer is RMSProp", IGNORED, float, fork="reward"),
)
