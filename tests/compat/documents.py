"""The command lines of five documents about the original programs, literally, with their shell variables set."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SIX = [
    "atari/AirRaid",
    "atari/Carnival",
    "atari/DemonAttack",
    "atari/NameThisGame",
    "atari/Pong",
    "atari/SpaceInvaders",
]
SIX_ORIGINAL = (
    "AirRaidNoFrameskip-v4,CarnivalNoFrameskip-v4,DemonAttackNoFrameskip-v4,NameThisGameNoFrameskip-v4,"
    "PongNoFrameskip-v4,SpaceInvadersNoFrameskip-v4"
)
VARIABLES = {
    "FUEL": "1",
    "MOVE": "-2",
    "TMOVE": "5",
    "WIDTH": "1024",
    "DEPTH": "2",
    "NAME": "staggered_1024_2",
    "GAME": "starpilot",
    "SAVE_DIR": "saved_models",
    "MODEL_DIR": "experiment_name",
}


@dataclass(frozen=True)
class Training:
    """A training command of a document: its text, and entries of the configuration and of the command expected here."""

    text: str
    config: dict[str, Any]
    words: str = ""  # words that the translated command contains, for example --run-dir


@dataclass(frozen=True)
class Other:
    """Another command of a document, and the Bestiary commands expected here."""

    text: str
    commands: list[str] = field(default_factory=list)


def program_and_arguments(text: str) -> tuple[str, list[str]]:
    """Return the program and the arguments of a command line such as `$ python -m torchbeast.monobeast --env X`."""
    text = re.sub(r"\$\{?([A-Z_]+)\}?", lambda match: VARIABLES[match[1]], text.removeprefix("$ "))
    words = shlex.split(text.replace("\\\n", " "))
    if words[:2] == ["python", "main.py"]:
        return "iam.main", words[2:]
    assert words[0] in ("python", "python3")
    assert words[1] == "-m"
    return words[2], words[3:]


# The configuration that all trainings of TorchBeast have.
TORCHBEAST = {
    "algo": "impala",
    "algo.optimizer": "rmsprop",
    "algo.alpha": 0.99,
    "algo.momentum": 0.0,
    "algo.lam": 1.0,
    "algo.discount": 0.99,
    "algo.value_coef": 0.5,
    "algo.max_grad_norm": 40.0,
    "algo.reward_clipping": "abs_one",
    "agent.init": "torch",
    "agent.reset_inputs": False,
    "agent.clamp_reward": True,
    "torso.subtract_mean": False,
}
POPART = {
    **TORCHBEAST,
    "env": SIX,
    "env.time_limit": 100_000,
    "steps": 300_000_000,
    "num_envs": 16,
    "pools": 2,
    "torso": "resnet",
    "critic": "popart",
    "critic.beta": 4e-4,
    "critic.average": "deviations",
    "critic.debias": False,
    "algo.rollout_length": 80,
    "algo.batch_size": 8,
    "algo.lr": 4.8e-4,
    "algo.lr_schedule": "linear",
    "algo.eps": 0.01,
}
RIVER_RAID = {
    **TORCHBEAST,
    "env": ["atari/Riverraid"],
    "reward": "center:2",
    "true_reward": "score=1; smooth:5",
    "steps": 50_000_000,
    "num_envs": 45,
    "pools": 2,
    "torso": "shallow",
    "torso.width": 1024,
    "torso.depth": 2,
    "algo.lr": 4e-4,
    "algo.lr_schedule": "staggered",
    "algo.lr_schedule_steps": 100_000_000,
    "algo.reward_scale": 1.0,
    "algo.eps": 0.01,
    "algo.entropy_coef": 0.01,
    "algo.batch_size": 4,
    "algo.rollout_length": 80,
}
PONG = {**TORCHBEAST, "env": ["atari/Pong"], "torso": "shallow", "algo.lr_schedule": "linear"}
POLYBEAST = {
    **PONG,
    "torso": "resnet",
    "steps": 100_000,
    "num_envs": 4,
    "algo.batch_size": 8,
    "algo.rollout_length": 80,
    "algo.lr": 4.8e-4,
    "algo.entropy_coef": 6e-4,
}
SRWM = {
    **TORCHBEAST,
    "env": [f"procgen/{game}:easy" for game in "bigfish fruitbot maze leaper plunder starpilot".split()],
    "env.levels": "0:200",
    "valid_levels": "500:700",
    "valid_mode": "easy",
    "valid_episodes": 10,
    "steps": 300_000_000,
    "keep_at": [150_000_000],
    "num_envs": 48,
    "pools": 2,
    "logger": ["wandb"],
    "logger.project": "proj_name_for_wandb",
    "torso": "resnet",
    "memory": "srwm",
    "memory.truncate": "step",
    "memory.hidden": 128,
    "memory.layers": 2,
    "memory.heads": 8,
    "memory.head_size": 16,
    "memory.ff": 512,
    "algo.lr": 6e-4,
    "algo.eps": 0.01,
    "algo.entropy_coef": 0.01,
    "algo.batch_size": 32,
    "algo.rollout_length": 50,
}
PPO = {
    "algo": "ppo",
    "algo.lam": 1.0,
    "algo.discount": 0.99,
    "algo.entropy_coef": 0.01,
    "algo.value_coef": 0.5,
    "algo.value_clip": True,
    "algo.clip": 0.1,
    "algo.eps": 1e-5,
    "algo.epochs": 3,
    "algo.lr": 2.5e-4,
    "algo.lr_schedule": "constant",
    "algo.max_grad_norm": 0.5,
}
WAREHOUSE = {
    **PPO,
    "env": ["warehouse"],
    "env.legacy": True,
    "steps": 4_000_000,
    "num_envs": 16,
    "algo.reward_clipping": "return_std",
}
FNN8 = {
    **WAREHOUSE,
    "agent": "basic",
    "torso.sizes": [512, 256, 64],
    "memory": "none",
    "algo.rollout_length": 8,
    "algo.sequence_length": 1,
}
FNN1 = {**FNN8, "algo.rollout_length": 1}
GRU = {
    **WAREHOUSE,
    "agent": "basic",
    "torso.depth": 0,
    "memory": "gru",
    "memory.hidden": 64,
    "algo.rollout_length": 8,
    "algo.sequence_length": 8,
}
IAM = {
    **WAREHOUSE,
    "agent": "iam",
    "agent.dset": "legacy",
    "agent.policy_layers": [64],
    "agent.value_layers": None,
    "agent.head_activation": "none",
    "torso.sizes": [512, 256, 64],
    "memory": "gru",
    "memory.hidden": 64,
    "algo.rollout_length": 8,
    "algo.sequence_length": 8,
}
BREAKOUT = {
    **PPO,
    "env": ["atari/Breakout"],
    "env.flicker": 0.0,
    "steps": 50_007_104,
    "num_envs": 8,
    "agent": "iam",
    "agent.dset": "attention",
    "agent.attention_bias": True,
    "agent.policy_layers": [64, 64],
    "agent.value_layers": [64, 64],
    "agent.head_activation": "tanh",
    "torso": "shallow",
    "torso.width": 64,
    "torso.depth": 3,
    "memory": "gru",
    "memory.hidden": 64,
    "algo.rollout_length": 8,
    "algo.sequence_length": 8,
}
FLICKER = {**BREAKOUT, "env.flicker": 0.5, "env.flicker_mode": "stack"}
WAREHOUSE_NETWORKS = {
    "FNN8": ("--num-steps 8 --recurrent-policy", FNN8),
    "FNN1": ("--num-steps 1 --recurrent-policy", FNN1),
    "GRU": ("--num-steps 8", GRU),
    "IAM": ("--num-steps 8 --IAM", IAM),
}
# What follows --seed in the document: the seed, and in some lines a note.
WAREHOUSE_SEEDS = {
    "FNN8": ("1 12306 seconds", "2", "3 14635.87 seconds"),
    "FNN1": ("1 takes too long 170fps",),
    "GRU": ("1", "2", "3 12880 seconds"),
    "IAM": ("1", "2", "3"),
}
BREAKOUT_LINE = "python main.py --env-name BreakoutNoFrameskip-v4 --num-processes 8 --num-env-steps"
TUNING = (
    ("10000000", "0.01", "IAM_lr_001-1", " 9177 seconds"),
    ("20000000", "0.0003", "IAM_lr_00003-1", ""),
    ("20000000", "0.0002", "IAM_lr_00002-1", ""),
    ("20000000", "0.0001", "IAM_lr_00001-1", " 17857 seconds"),
    ("20000000", "0.0001", "IAM_lr_00001-1", ""),
)


def _warehouse() -> Iterator[Training]:
    for name, (flags, config) in WAREHOUSE_NETWORKS.items():
        for run in (1, 2, 3):
            folder = f"./log_w/{name}-{run}"
            line = f"python main.py --env-name warehouse {flags} --log-dir {folder}"
            yield Training(line, {**config, "seed": 1}, f"--run-dir {folder}")
        for run, seed in enumerate(WAREHOUSE_SEEDS[name], 1):
            folder = f"./log_w/{name}-{run}"
            line = f"python main.py --env-name warehouse {flags} --log-dir {folder} --seed {seed}"
            yield Training(line, {**config, "seed": run}, f"--run-dir {folder}")


def _tuning() -> Iterator[Training]:
    for steps, lr, name, note in TUNING:
        line = f"{BREAKOUT_LINE} {steps} --num-steps 8 --ppo-epoch 3 --lr {lr}"
        yield Training(
            f"{line} --log-dir ./log_bf_lr/{name} --IAM --flicker{note}",
            {**FLICKER, "steps": int(steps), "algo.lr": float(lr)},
            f"--run-dir ./log_bf_lr/{name}",
        )


TRAININGS = [
    # PopArt fork
    Training(
        f"python -m torchbeast.polybeast --mode train --xpid MultiTaskPopArt --env {SIX_ORIGINAL} "
        "--total_steps 300000000 --use_popart",
        {**POPART, "algo.entropy_coef": 0.01},
        "--run-dir ./logs/torchbeast-local/MultiTaskPopArt",
    ),
    Training(
        f"python -m torchbeast.monobeast --mode train --xpid MultiTaskPopArt --env {SIX_ORIGINAL} "
        "--total_steps 300000000 --use_popart",
        {**POPART, "num_envs": 24, "algo.entropy_coef": 6e-4},
        "--run-dir /home/me/logs/torchbeast/MultiTaskPopArt",
    ),
    # Reward misspecification
    Training(
        r"""python -m torchbeast.monobeast \
  --env RiverraidNoFrameskip-v4 \
  --num_actors 45 \
  --total_steps 50000000 \
  --learning_rate 0.0004 \
  --epsilon 0.01 \
  --entropy_cost 0.01 \
  --batch_size 4 \
  --unroll_length 80 \
  --num_buffers 60 \
  --num_threads 12 \
  --fuel_multiplier $FUEL \
  --move_penalty $MOVE \
  --true_move_penalty $TMOVE \
  --hidden_size $WIDTH --num_layers $DEPTH \
  --xpid $NAME \
  --savedir "~/torchbeast/runs" """,
        RIVER_RAID,
        "--run-dir /home/me/torchbeast/runs/staggered_1024_2",
    ),
    # TorchBeast
    Training(
        "$ python -m torchbeast.monobeast --env PongNoFrameskip-v4",
        {**PONG, "steps": 100_000, "num_envs": 4, "algo.batch_size": 8, "algo.lr": 4.8e-4, "algo.entropy_coef": 6e-4},
        "--run-dir /home/me/logs/torchbeast/torchbeast-",
    ),
    Training(
        r"""$ python -m torchbeast.monobeast \
     --env PongNoFrameskip-v4 \
     --num_actors 45 \
     --total_steps 30000000 \
     --learning_rate 0.0004 \
     --epsilon 0.01 \
     --entropy_cost 0.01 \
     --batch_size 4 \
     --unroll_length 80 \
     --num_buffers 60 \
     --num_threads 4 \
     --xpid example
""",
        {**PONG, "steps": 30_000_000, "num_envs": 45, "algo.batch_size": 4, "algo.lr": 4e-4, "algo.entropy_coef": 0.01},
        "--run-dir /home/me/logs/torchbeast/example",
    ),
    Training("$ python -m torchbeast.polybeast", POLYBEAST, "--run-dir /home/me/palaas/torchbeast/torchbeast-"),
    Training(
        "$ python3 -m torchbeast.polybeast_learner", POLYBEAST, "--run-dir /home/me/palaas/torchbeast/torchbeast-"
    ),
    Training(
        "python -m torchbeast.polybeast_env --num_servers 10",
        {**POLYBEAST, "num_envs": 1, "cluster": "local", "actors": 10, "pools": 1},
        "--cluster local --actors 10 --num-envs 1",
    ),
    # SRWM on ProcGen
    Training(
        r"""python -m torchbeast_procgen.polybeast \
     --single_gpu \
     --multi_env 6 \
     --pipes_basename "unix:/tmp/polybeast_somename" \
     --num_actors 48 \
     --num_servers 48 \
     --total_steps 300_000_000 \
     --save_extra_checkpoint 150_000_000 \
     --learning_rate 0.0006 \
     --grad_norm_clipping 40 \
     --epsilon 0.01 \
     --entropy_cost 0.01 \
     --batch_size 32 \
     --unroll_length 50 \
     --num_actions 15 \
     --num_layers 2 \
     --hidden_size 128 \
     --num_head 8 \
     --dim_head 16 \
     --use_sr \
     --num_learner_threads 1 \
     --num_inference_threads 1 \
     --project_name "proj_name_for_wandb" \
     --use_wandb \
     --xpid "experiment_name" \
     --num_levels 200 \
     --start_level 0 \
     --distribution_mode "easy" \
     --valid_distribution_mode "easy" \
     --valid_num_levels 200 \
     --valid_start_level 500 \
     --valid_num_episodes 10 \
     --savedir ${SAVE_DIR}""",
        SRWM,
        "--run-dir saved_models/experiment_name",
    ),
    # Influence-aware memory
    *_warehouse(),
    Training(
        f"{BREAKOUT_LINE} 50007104 --num-steps 8 --lr 0.00025 --log-dir ./log_b/IAM-1 --IAM",
        BREAKOUT,
        "--run-dir ./log_b/IAM-1",
    ),
    Training(
        f"{BREAKOUT_LINE} 160000000 --num-steps 8 --lr 0.00025 --log-dir ./log_breakout_no_flicker/run2 --IAM",
        {**BREAKOUT, "steps": 160_000_000},
        "--run-dir ./log_breakout_no_flicker/run2",
    ),
    Training(
        f"{BREAKOUT_LINE} 50007104 --num-steps 8 --ppo-epoch 3 --lr 0.00025 --log-dir ./log_bf/IAM-1 --IAM "
        "--flicker 42667 seconds",
        FLICKER,
        "--run-dir ./log_bf/IAM-1",
    ),
    *_tuning(),
]

DIRECTORY = "/path/to/directory"
GAMES = " ".join(f"{DIRECTORY}/{name.removeprefix('atari/')}" for name in SIX)
COMPARED = {
    "single_multi": f"{DIRECTORY}/MultiTask {GAMES}",
    "single_multipop": f"{DIRECTORY}/MultiTaskPopArt {GAMES}",
    "multi_multipop": f"{DIRECTORY}/MultiTask {DIRECTORY}/MultiTaskPopArt",
}
SALIENCY = "--greedy --seed 0 --noop-max 20 --noop-mode fixed --scale quantile"
EVAL_PROCGEN = r"""python -m torchbeast_procgen.polybeast_learner \
     --mode test \
     --env procgen:procgen-${GAME}-v0 \
     --num_actors 48 \
     --num_servers 48 \
     --total_steps 200000000 \
     --save_extra_checkpoint 50000000 \
     --learning_rate 0.0006 \
     --grad_norm_clipping 40 \
     --epsilon 0.01 \
     --entropy_cost 0.01 \
     --batch_size 32 \
     --unroll_length 50 \
     --num_actions 15 \
     --num_layers 2 \
     --hidden_size 128 \
     --num_head 8 \
     --dim_head 16 \
     --use_sr \
     --num_learner_threads 1 \
     --num_inference_threads 1 \
     --xpid ${MODEL_DIR} \
     --num_levels 200 \
     --start_level 0 \
     --test_distribution_mode 'easy' \
     --test_num_levels 200 \
     --test_start_level 0 \
     --savedir ${SAVE_DIR}"""


def _procgen_tests() -> Iterator[Other]:
    for start in (0, 1000, 1200, 1400):
        line = EVAL_PROCGEN.replace("--test_start_level 0", f"--test_start_level {start}")
        words = (
            f"eval saved_models/experiment_name --env procgen/starpilot:easy --levels {start}:{start + 200} --greedy"
        )
        yield Other(line, [words])


OTHERS = [
    Other(
        "python -m torchbeast.polybeast --mode test --xpid MultiTaskPopArt --env PongNoFrameskip-v4 --savedir=./models",
        ["eval ./models/MultiTaskPopArt --env atari/Pong --episodes 100 --greedy"],
    ),
    Other(
        "python -m torchbeast.polybeast --mode test_render --xpid MultiTaskPopArt --env PongNoFrameskip-v4 "
        "--savedir=./models",
        ["video ./models/MultiTaskPopArt --env atari/Pong --greedy --show"],
    ),
    Other(
        "python -m torchbeast.saliency --xpid MultiTaskPopArt --env PongNoFrameskip-v4 --first_frame 0 --num_frames "
        "100 --savedir=./models",
        [
            f"look saliency ./models/MultiTaskPopArt --env atari/Pong {SALIENCY} --start 0 --length 100 --density 2 "
            "--radius 2"
        ],
    ),
    Other(
        "python -m torchbeast.analysis.analyze_resnet --model_load_path /path/to/directory --mode filter_comp "
        "--comp_num_models 10",
        [
            f"look filters {runs} --match {match} --points 10 --out {DIRECTORY}/{name}-{match}.png"
            for name, runs in COMPARED.items()
            for match in ("index", "optimal")
        ],
    ),
    Other(
        "python -m torchbeast.analysis.analyze_resnet --load_path /path/to/directory --mode filter_comp_plot "
        "--save_figures",
        [
            f"look filters {runs} --match index --points 10 --out {DIRECTORY}/{name}-index.png --overwrite"
            for name, runs in COMPARED.items()
        ],
    ),
    Other(
        r"""python -m torchbeast.monobeast \
  --env RiverraidNoFrameskip-v4 \
  --mode eval \
  --savedir "~/torchbeast/runs" \
  --xpid ${NAME} \
  --num_episodes 4 \
  --fuel_multiplier $FUEL \
  --move_penalty $MOVE \
  --true_move_penalty $TMOVE
""",
        ["audit /home/me/torchbeast/runs/staggered_1024_2 --episodes 15 --greedy"],
    ),
    Other(
        r"""$ python -m torchbeast.monobeast \
     --env PongNoFrameskip-v4 \
     --mode test \
     --xpid example
""",
        ["eval /home/me/logs/torchbeast/example --env atari/Pong --episodes 10 --greedy"],
    ),
    Other(
        "python -m torchbeast.polybeast --mode test --xpid MultiTask --env PongNoFrameskip-v4 "
        "--savedir=./logs/torchbeast",
        ["eval ./logs/torchbeast/MultiTask --env atari/Pong --episodes 100 --greedy"],
    ),
    Other(
        "python -m torchbeast.polybeast --mode test_render --xpid MultiTask --env PongNoFrameskip-v4 "
        "--savedir=./logs/torchbeast",
        ["video ./logs/torchbeast/MultiTask --env atari/Pong --greedy --show"],
    ),
    Other(
        "python -m torchbeast.saliency --xpid MultiTask --env PongNoFrameskip-v4 --resolution=75 --num_frames 5 "
        "--savedir=./logs/torchbeast",
        [
            f"look saliency ./logs/torchbeast/MultiTask --env atari/Pong {SALIENCY} --start 0 --length 5 --density 2 "
            "--radius 2"
        ],
    ),
    *_procgen_tests(),
]
