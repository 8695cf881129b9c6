"""Translation of `main.py` of the influence-aware-memory reproduction, which is based on pytorch-a2c-ppo-acktr.

Each public function with the argument `values` is a rule (`Mode.rules`). A rule gets the values of the original flags
and returns words of the Bestiary command.
"""

from bestiary.compat.flag_types import IGNORED, JOINT, REFUSED, Flag, Mode, Program, Values, Words, format_value
from bestiary.compat.torchbeast_flags import expand_path
from bestiary.envs.original_names import bestiary_names
from bestiary.utils.errors import UserError

HIDDEN = 64  # units of the GRU and of the last fully connected layer


def env_name(text: str) -> str:
    """Return the Bestiary name of an environment."""
    if text.lower().startswith("traffic"):
        raise UserError(
            f"--env-name {text}: the traffic simulation (SUMO) is not available; use warehouse or an Atari game"
        )
    names = bestiary_names(text)
    if text == "warehouse" or len(names) == 1:
        return text if text == "warehouse" else names[0]
    raise UserError(f"--env-name {text}: unknown; expected warehouse or an Atari game such as BreakoutNoFrameskip-v4")


def environment(values: Values) -> Words:
    """Return the name of the environment and its options."""
    name = env_name(values["env-name"])
    if name != "warehouse":
        return Words((name, "--time-limit", "100k"))  # time limit of Gym: 400,000 frames
    return Words(
        # In the original, VecNormalize normalises rewards only if the observations are vectors, not in Atari games.
        (name, "--legacy", "on", "--algo.reward-clipping", "return_std"),
        (
            "warehouse: at the time limit, the value of the final observation is bootstrapped; in the original, the "
            "limit is a terminal state",
        ),
    )


def new_run(values: Values) -> Words:
    """Return the option for the run folder."""
    if values["log-dir"] is None:
        return Words((), ("no --log-dir: the run folder is created in runs/",))
    return Words(("--run-dir", expand_path(values["log-dir"])))


def network(values: Values) -> Words:
    """Return the options of the network: IAM, GRU or FNN.

    In the original, the meaning of --recurrent-policy is inverted: this flag selects the FNN, which has no memory.
    """
    is_image = env_name(values["env-name"]) != "warehouse"
    if values["IAM"]:
        return _iam(values, is_image)
    if is_image:
        raise UserError(
            f"--env-name {values['env-name']}: the original has only the IAM network for Atari games; add --IAM"
        )
    words = ["--torso", "mlp", "--torso.normalise-inputs", "on", "--agent.extra-inputs", "none"]
    if values["recurrent-policy"]:
        words += ["--torso.sizes", "512,256,64", "--memory", "none"]
        return Words(tuple(words), ("--recurrent-policy: switches the GRU off, as in the original (network FNN)",))
    words += ["--torso.depth", "0", "--memory", "gru", "--memory.hidden", str(HIDDEN)]
    return Words(tuple(words))


def _iam(values: Values, is_image: bool) -> Words:
    if values["recurrent-policy"]:
        raise UserError(
            "--recurrent-policy: with --IAM, the original ends with an error, because this flag switches the GRU off; "
            "remove it"
        )
    words = ["--agent", "iam", "--memory", "gru", "--memory.hidden", str(HIDDEN)]
    if is_image:
        words += ["--agent.dset", "attention", "--agent.heads", "1", "--agent.units", "128"]
        words += ["--torso", "shallow", "--torso.width", "64", "--torso.depth", "3", "--torso.subtract-mean", "off"]
        words += ["--agent.attention-bias", "on", "--agent.policy-layers", "64,64", "--agent.value-layers", "64,64"]
    else:
        words += ["--agent.dset", "legacy", "--torso", "mlp", "--torso.sizes", "512,256,64"]
        words += ["--torso.normalise-inputs", "on"]
        # In the original, no activation follows the layer before the policy head.
        words += ["--agent.policy-layers", "64", "--agent.head-activation", "none"]
    return Words(tuple(words))


def batches(values: Values) -> Words:
    """Return the options for the number of environments, the number of minibatches and the sequence length."""
    length = values["num-steps"]
    has_memory = values["IAM"] or not values["recurrent-policy"]
    sequence = length if has_memory else 1  # without memory, the original shuffles single steps
    wanted = 1 if values["algo"] == "a2c" else values["num-mini-batch"]
    processes = values["num-processes"]
    sequences = processes * length // sequence
    minibatches = min(wanted, sequences)
    words = ["--num-envs", str(processes), "--algo.minibatches", str(minibatches)]
    words += ["--algo.sequence-length", str(sequence)]
    differences = []
    if minibatches != wanted:
        differences.append(f"num-mini-batch {wanted}: reduced to {minibatches}, the number of sequences of a rollout")
    elif sequences % minibatches:
        differences.append(
            f"num-mini-batch {wanted}: does not divide the {sequences} sequences of a rollout, so some minibatches "
            "have one sequence more; the original leaves out the remaining sequences"
        )
    if values["algo"] == "ppo" and "num-mini-batch" not in values.given:
        differences.append("the documents do not state the number of minibatches; 4 was chosen here")
    return Words(tuple(words), tuple(differences))


def targets(values: Values) -> Words:
    """Return the option for lambda of GAE. If the original does not use GAE, lambda is 1."""
    return Words(("--algo.lam", format_value(values["gae-lambda"] if values["use-gae"] else 1)))


def loss(values: Values) -> Words:
    """Return the options for the loss and for the number of epochs. They differ between PPO and A2C."""
    if values["algo"] == "acktr":
        raise UserError("--algo acktr: ACKTR (K-FAC) is not available; use ppo or a2c")
    words = ["--algo", "ppo", "--algo.clip", format_value(values["clip-param"])]
    if values["algo"] == "a2c":
        words += ["--algo.value-coef", format_value(2 * values["value-loss-coef"]), "--algo.epochs", "1"]
        words += ["--algo.value-clip", "off", "--algo.normalise-advantages", "off"]
        differences = (
            "--algo a2c: one epoch of PPO with one minibatch; the optimizer is Adam, in the original RMSProp",
            "value-loss-coef: doubled, because the value loss of a2c has no factor 1/2 in the original",
        )
        return Words(tuple(words), differences)
    words += ["--algo.value-coef", format_value(values["value-loss-coef"])]
    words += ["--algo.epochs", str(values["ppo-epoch"])]
    return Words((*words, "--algo.value-clip", "on", "--algo.normalise-advantages", "on"))


def intervals(values: Values) -> Words:
    """Return the intervals of logs and validations in steps. The original states them in updates."""
    steps = values["num-processes"] * values["num-steps"]
    words = ["--log-every", str(values["log-interval"] * steps)]
    if values["eval-interval"] is not None:
        words += ["--valid-every", str(values["eval-interval"] * steps)]
    return Words(tuple(words))


def schedule(values: Values) -> Words:
    """Return the option for the learning-rate schedule."""
    return Words(("--algo.lr-schedule", "linear" if values["use-linear-lr-decay"] else "constant"))


def flicker(values: Values) -> Words:
    """Return the options for flicker. All frames of a stack are replaced by zeros together."""
    if not values["flicker"]:
        return Words()
    if env_name(values["env-name"]) == "warehouse":
        raise UserError("--flicker: only for Atari games; remove it")
    return Words(("--flicker", "0.5", "--flicker-mode", "stack"))


FLAGS = (
    Flag("env-name", "BreakoutNoFrameskip-v4", "ENV: `atari/Breakout` or `warehouse --legacy on`", status=JOINT),
    Flag(
        "algo",
        "ppo",
        "`--algo ppo` or `--preset a2c`",
        status=JOINT,
        choices=("ppo", "a2c", "acktr"),
    ),
    Flag("IAM", False, "`--agent iam --memory gru --memory.hidden 64`", status=JOINT, kind=bool),
    Flag(
        "recurrent-policy",
        False,
        "given: `--memory none` (FNN); not given: `--memory gru` (GRU), as in the original",
        status=JOINT,
        kind=bool,
    ),
    Flag("num-processes", 16, "`--num-envs`", status=JOINT, kind=int),
    Flag("num-steps", 8, "--rollout-length", kind=int),
    Flag("num-env-steps", 4_000_000, "--steps", kind=int),
    Flag("lr", 2.5e-4, "--lr", kind=float),
    Flag("eps", 1e-5, "--algo.eps", kind=float),
    Flag("alpha", 0.99, "", "not available: the optimizer is Adam, also for a2c", IGNORED, float),
    Flag("gamma", 0.99, "--algo.discount", kind=float),
    Flag("use-gae", False, "`--algo.lam` gae-lambda; not given: `--algo.lam 1`", status=JOINT, kind=bool),
    Flag("gae-lambda", 0.95, "`--algo.lam`", "has an effect only with --use-gae, as in the original", JOINT, float),
    Flag("entropy-coef", 0.01, "--algo.entropy-coef", kind=float),
    Flag("value-loss-coef", 0.5, "`--algo.value-coef`; a2c: doubled", status=JOINT, kind=float),
    Flag("max-grad-norm", 0.5, "--algo.max-grad-norm", kind=float),
    Flag("seed", 1, "--seed", kind=int),
    Flag("ppo-epoch", 3, "`--algo.epochs`", status=JOINT, kind=int),
    Flag("num-mini-batch", 4, "`--algo.minibatches` (at most the number of sequences)", status=JOINT, kind=int),
    Flag("clip-param", 0.1, "`--algo.clip`", status=JOINT, kind=float),
    Flag("use-linear-lr-decay", False, "`--algo.lr-schedule linear`; not given: `constant`", status=JOINT, kind=bool),
    Flag(
        "flicker",
        False,
        "`--flicker 0.5 --flicker-mode stack`",
        "the whole stack of frames is blank, as in the original; only in the original, the frames of this stack are "
        "also blank in the following stacks. --flicker-mode frame blanks single frames, as in the paper",
        JOINT,
        bool,
    ),
    Flag("log-dir", None, "--run-dir", status=JOINT),
    Flag("save-dir", None, "", "not needed: checkpoints are written to the run folder (--log-dir)", IGNORED),
    Flag("log-interval", 10, "`--log-every` = N x num-processes x num-steps", status=JOINT, kind=int),
    Flag(
        "save-interval",
        100,
        "",
        "not needed: a checkpoint is saved every 5 minutes and replaces older ones (--save-minutes, --save-every)",
        IGNORED,
        int,
    ),
    Flag("eval-interval", None, "`--valid-every` = N x num-processes x num-steps", status=JOINT, kind=int),
    Flag("no-cuda", False, "--device cpu", kind=bool),
    Flag(
        "cuda-deterministic",
        False,
        "",
        "a training is deterministic only with one thread; for this, add --runtime serial to the printed command",
        IGNORED,
        bool,
    ),
    Flag(
        "use-proper-time-limits",
        False,
        "",
        "always on: the value of the final observation is bootstrapped at time limits",
        IGNORED,
        bool,
    ),
    Flag("gail", False, "", "imitation learning (GAIL) is not available", REFUSED, bool),
    Flag("gail-experts-dir", None, "", "imitation learning (GAIL) is not available", REFUSED),
    Flag("gail-batch-size", None, "", "imitation learning (GAIL) is not available", REFUSED, int),
    Flag("gail-epoch", None, "", "imitation learning (GAIL) is not available", REFUSED, int),
)


MAIN = Program(
    "iam.main",
    FLAGS,
    {
        "train": Mode(
            command=("train",),
            rules=(
                environment,
                new_run,
                loss,
                batches,
                network,
                targets,
                schedule,
                intervals,
                flicker,
            ),
            fixed=(("--save-every 0", "only rolling checkpoints"),),
            differences=(
                "defaults that the documents of the original do not state are those of pytorch-a2c-ppo-acktr, except "
                "for --algo, --ppo-epoch, --clip-param and --num-mini-batch",
            ),
        )
    },
    extra_words="in the documents of the original, words without a flag are notes, for example the duration of a run",
)
