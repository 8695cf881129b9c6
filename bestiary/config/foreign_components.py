"""Names of components (torsos, memories, agents, ...) in other programs, for hints about unknown names.

The programs are TorchBeast and its forks, Stable-Baselines3, CleanRL and RLlib. Names are written in lower case.
Names of flags are in `foreign_flags.py`.
"""

# Kind of component -> name in another program -> option or name in Bestiary.
FOREIGN_COMPONENTS = {
    "torso": {
        "cnn": "--torso shallow or --torso resnet",
        "nature": "--torso shallow",
        "naturecnn": "--torso shallow",
        "cnnpolicy": "--torso shallow",
        "atari": "--torso shallow",
        "atarinet": "--torso shallow",
        "impala": "--torso resnet",
        "impalacnn": "--torso resnet",
        "deep": "--torso resnet",
        "fc": "--torso mlp",
        "fcnet": "--torso mlp",
        "mlppolicy": "--torso mlp",
        "lstm": "--memory lstm",
        "gru": "--memory gru",
    },
    "memory": {
        "rnn": "--memory lstm or --memory gru",
        "recurrent": "--memory lstm or --memory gru",
        "ff": "--memory none",
        "feedforward": "--memory none",
        "sr": "--memory srwm",
        "psr": "--memory fake-sr",
        "smfwp": "--memory sr-delta",
        "lt": "--memory linear-transformer",
        "dd": "--memory delta-delta",
        "iam": "--agent iam",
    },
    "agent": {
        "lstm": "--memory lstm",
        "gru": "--memory gru",
        "cnn": "--torso shallow or --torso resnet",
        "resnet": "--torso resnet",
        "deep": "--torso resnet",
        "shallow": "--torso shallow",
        "mlp": "--torso mlp",
        "ppo": "--algo ppo",
        "impala": "--algo impala",
        "attention": "--agent aaa or --agent iam",
    },
    "algo": {
        "a2c": "--preset a2c",
        "a3c": "--preset a2c or --algo impala",
        "ppo2": "--algo ppo",
        "recurrentppo": "--algo ppo --memory lstm",
        "ppo_lstm": "--algo ppo --memory lstm",
        "vtrace": "--algo impala",
        "appo": "--algo impala",
        "popart": "--critic popart",
    },
    "critic": {
        "pop-art": "--critic popart",
        "multitask": "--critic per-task",
        "multi": "--critic per-task",
        "separate": "--critic shared (one value for all tasks) or --critic per-task",
    },
}
NOT_AVAILABLE = {"dqn", "ddqn", "rainbow", "qrdqn", "sac", "td3", "ddpg", "acktr", "trpo", "r2d2", "muzero", "dreamer"}


def foreign_component_hint(kind: str, name: str) -> str:
    """Return a hint if `name` is a component in another program, otherwise an empty text."""
    text = name.lower()
    if kind == "algo" and text in NOT_AVAILABLE:
        return f"; Bestiary has no {name}"
    known = FOREIGN_COMPONENTS.get(kind, {}).get(text)
    return f"; did you mean {known}?" if known else ""
