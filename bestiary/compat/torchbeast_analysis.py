"""Translation of the analysis programs of TorchBeast's PopArt fork: saliency, filter comparison and attention.

Each public function returns words of the equivalent Bestiary command (see `Mode.rules` and `Mode.each`).
"""

from dataclasses import replace

from bestiary.compat.flag_types import IGNORED, JOINT, REFUSED, Flag, Mode, Program, Values, Words
from bestiary.compat.torchbeast import existing_run, task_names
from bestiary.compat.torchbeast_flags import expand_path
from bestiary.envs.original_names import SIX_GAMES
from bestiary.utils.errors import UserError

SALIENCY_COMMAND = "look saliency"
ATTENTION_COMMAND = "look attention"
FILTERS_COMMAND = "look filters"
DRAWN = (SALIENCY_COMMAND, ATTENTION_COMMAND)

# --- saliency and attention ---


def drawn_environment(values: Values) -> Words:
    """Return the option for the environment whose game is shown in the picture."""
    return Words(("--env", *task_names(values["env"])))


def saliency_output(values: Values) -> Words:
    """Return the option for the output file if --saliencydir is given.

    A relative path in --saliencydir starts in the run folder.
    """
    if values["saliencydir"] is None:
        return Words()
    folder = expand_path(f"{values['savedir']}/{values['xpid']}/{values['saliencydir']}")
    if values["saliencydir"].startswith(("/", "~")):
        folder = expand_path(values["saliencydir"])
    return Words(("--out", f"{folder}/Saliency.png"))


def attention_output(values: Values) -> Words:
    """Return the option for the output file if --save_dir is given."""
    return Words(("--out", f"{expand_path(values['save_dir'])}/attention.mp4") if values["save_dir"] else ())


GAME_FIXED = (
    ("--greedy --seed 0", "the most probable action is chosen"),
    ("--noop-max 20 --noop-mode fixed", "20 no-op frames at the start"),
)
RUN_FLAGS = (
    Flag("savedir", "./logs/torchbeast", "first part of RUN = SAVEDIR/XPID", status=JOINT, commands=DRAWN),
    Flag("xpid", None, "last part of RUN", status=JOINT, commands=DRAWN),
    Flag(
        "intermediate_model_id",
        None,
        "--checkpoint",
        "the checkpoint nearest to this number of steps",
        convert=lambda model_id: str(int(model_id)),
        commands=DRAWN,
    ),
    Flag("env", "PongNoFrameskip-v4", "`--env`, for example `--env atari/Pong`", status=JOINT, commands=DRAWN),
)
SALIENCY = Program(
    "torchbeast.saliency",
    (
        *RUN_FLAGS,
        Flag("first_frame", 0, "--start", kind=int, commands=DRAWN, convert=str),
        Flag("num_frames", 10_000, "--length", kind=int, commands=DRAWN, convert=str),
        Flag("density", 2, "--density", kind=int, commands=DRAWN),
        Flag("radius", 2.0, "--radius", kind=float, commands=DRAWN),
        Flag("resolution", 75, "", "not used, as in the fork; the size of the image is that of the game", IGNORED, int),
        Flag(
            "saliencydir",
            None,
            "`--out SALIENCYDIR/Saliency.png`; the folder must exist",
            "each frame is one PNG file with colours on the screen; the fork writes two files per frame",
            JOINT,
            commands=DRAWN,
        ),
        Flag(
            "actions",
            None,
            "",
            "a text file of actions cannot be replayed; record games with bestiary eval RUN --record and draw them "
            "with bestiary look saliency RUN --replay recordings/NAME.json",
            REFUSED,
            commands=DRAWN,
        ),
        Flag("use_lstm", False, "", "not needed: the run folder states the network", IGNORED, bool),
    ),
    {
        "saliency": Mode(
            command=("look", "saliency"),
            rules=(existing_run, drawn_environment, saliency_output),
            fixed=(
                *GAME_FIXED,
                ("--scale quantile", "in each frame, only the highest 10 % of the scores are coloured"),
            ),
            differences=(
                "without --saliencydir, one GIF with the saliency on the screen is written to interpretability/ of the "
                "run folder, and the scores as .npz; for single images add --out FOLDER/NAME.png",
                "the value is drawn in green, in the fork in blue; the game is drawn to its end, in the fork to the "
                "first lost life",
            ),
        )
    },
    default_mode="saliency",
)
VISUALIZE_AAA = Program(
    "torchbeast.analysis.visualize_aaa",
    (
        *RUN_FLAGS,
        Flag("first_frame", 200, "--start", kind=int, commands=DRAWN, convert=str),
        Flag("num_frames", 50, "--length", kind=int, commands=DRAWN, convert=str),
        Flag("save_dir", None, "`--out SAVE_DIR/attention.mp4`; the folder must exist", status=JOINT, commands=DRAWN),
    ),
    {
        "attention": Mode(
            command=("look", "attention"),
            rules=(existing_run, drawn_environment, attention_output),
            fixed=GAME_FIXED,
            differences=("all attention heads are drawn, in the fork only the first",),
        )
    },
    default_mode="attention",
)

# --- filters ---

COMPARISONS = ("single_multi", "single_multipop", "multi_multipop", "single_single", "time_steps")
LAYERS_PER_SECTION = 5  # a section of the ResNet: one convolution, then two residual blocks of two convolutions


def _runs_of(comparison: str, reference: str) -> tuple[str, ...]:
    """Return the names of the runs that are compared.

    The first run is the reference, with which the other runs are compared. The comparison "time_steps" has no
    reference: it compares the checkpoints of each run. The argument `reference` is the reference run of
    "single_single".
    """
    if comparison == "single_single":
        return (reference, *(game for game in SIX_GAMES if game != reference))
    if comparison == "time_steps":
        return (*SIX_GAMES, "MultiTask", "MultiTaskPopArt")
    if comparison == "multi_multipop":
        return ("MultiTask", "MultiTaskPopArt")
    return ("MultiTask" if comparison == "single_multi" else "MultiTaskPopArt", *SIX_GAMES)


def filter_comparisons(values: Values) -> tuple[Words, ...]:
    """Return the words of one command for each comparison and each way of matching filters."""
    plots = values["mode"] == "filter_comp_plot"
    matchings = ["index"] if values["comp_no_optimal"] else ["index", "optimal"]
    if plots:
        matchings = [{"default": "index", "optimal": "optimal"}[values["plot_match_type"]]]
    return tuple(
        _comparison(values, comparison, matching, plots)
        for comparison in _chosen_comparisons(values)
        for matching in matchings
    )


def _chosen_comparisons(values: Values) -> list[str]:
    chosen = [part for part in values["comp_between"].replace(",", " ").split() if part]
    if unknown := [name for name in chosen if name not in COMPARISONS]:
        raise UserError(f"--comp_between {unknown[0]}: expected {', '.join(COMPARISONS)}")
    return chosen


def _comparison(values: Values, comparison: str, matching: str, plots: bool) -> Words:
    folder = expand_path(values["model_load_path"] or values["load_path"])
    out = expand_path(values["save_dir"]) if values["save_dir"] else folder
    runs = (f"{folder}/{name}" for name in _runs_of(comparison, values["comp_single_single_model"]))
    words = [*runs, "--match", matching, "--points", str(values["comp_num_models"])]
    words += ["--out", f"{out}/{comparison}-{matching}.png"]
    if comparison == "time_steps":
        words += ["--between", "time"]
    if plots:
        words.append("--overwrite")
    return Words(tuple(words))


def filter_images(values: Values) -> tuple[Words, ...]:
    """Return the run and the layer whose filters are drawn.

    The layer is the path of a module inside the torso's convolutions, for example 2.first.
    """
    section, position = divmod(values["layer_index"], LAYERS_PER_SECTION)
    first = 4 * section
    layers = (
        f"{first}",
        f"{first + 2}.first",
        f"{first + 2}.second",
        f"{first + 3}.first",
        f"{first + 3}.second",
    )
    run = expand_path(values["model_load_path"] or values["load_path"])
    return (Words((run, "--draw", layers[position])),)


ANALYSIS = (FILTERS_COMMAND,)
COMPARE = Mode(
    command=("look", "filters"),
    each=filter_comparisons,
    differences=(
        "each command also draws its figure, and writes a CSV file beside it (the fork: pickle files); layers are also "
        "compared by the similarity of their outputs (CKA), unless --frames 0 is given",
    ),
)
ANALYZE_RESNET = Program(
    "torchbeast.analysis.analyze_resnet",
    (
        Flag(
            "mode",
            "filter_vis",
            "filter_comp, filter_comp_plot: `look filters RUN...`; filter_vis: `look filters RUN --draw LAYER`",
            status=JOINT,
            commands=ANALYSIS,
        ),
        Flag(
            "load_path",
            "./logs/torchbeast",
            "folder that contains RUN...; filter_vis: RUN",
            status=JOINT,
            commands=ANALYSIS,
        ),
        Flag("model_load_path", None, "like load_path, which it replaces", status=JOINT, commands=ANALYSIS),
        Flag(
            "save_dir",
            None,
            "`--out SAVE_DIR/NAME.png`; without it, figures are written to load_path (in the fork: ~/logs/resnet_vis)",
            status=JOINT,
            commands=ANALYSIS,
        ),
        Flag(
            "comp_between",
            "single_multi single_multipop multi_multipop",
            "one command for each comparison; the first RUN is the reference, with which the others are compared; "
            "time_steps: add `--between time`",
            status=JOINT,
            several=True,
            commands=ANALYSIS,
        ),
        Flag("comp_num_models", 10, "`--points`", status=JOINT, kind=int, commands=ANALYSIS),
        Flag(
            "comp_no_optimal",
            False,
            "only `--match index`; otherwise one command with `--match index` and one with `--match optimal`",
            status=JOINT,
            kind=bool,
            commands=ANALYSIS,
        ),
        Flag(
            "comp_single_single_model",
            "Carnival",
            "single_single: the first RUN",
            status=JOINT,
            choices=SIX_GAMES,
            commands=ANALYSIS,
        ),
        Flag(
            "plot_match_type",
            "default",
            "filter_comp_plot: `--match index` or `--match optimal`",
            status=JOINT,
            choices=("default", "optimal"),
            commands=ANALYSIS,
        ),
        Flag(
            "plot_metric_type",
            "mean",
            "",
            "not needed: the figure shows means per weight; the CSV file has sums, too",
            IGNORED,
        ),
        Flag("plot_heatmaps", False, "", "not needed: heat maps are always drawn", IGNORED, bool),
        Flag("save_figures", False, "", "not needed: figures are always written", IGNORED, bool),
        Flag("hide_plots", False, "", "not needed: figures are never shown on the screen", IGNORED, bool),
        Flag("layer_index", 0, "filter_vis: `--draw LAYER`", status=JOINT, kind=int, commands=ANALYSIS),
        Flag("filter_index", 0, "", "not needed: all filters of the layer are drawn", IGNORED, int),
        Flag(
            "match_num_models",
            False,
            "",
            "not available (half implemented in the fork): checkpoints are compared at equal fractions of the training",
            REFUSED,
            bool,
        ),
        Flag("pairwise_comp", False, "", "not used, as in the fork", IGNORED, bool),
        Flag("frame_height", 84, "", "not needed: the run folder states the size of the frames", IGNORED, int),
        Flag("frame_width", 84, "", "not needed: the run folder states the size of the frames", IGNORED, int),
        Flag("num_actions", 6, "", "not needed: the run folder states the network", IGNORED, int),
    ),
    {
        "filter_vis": Mode(
            command=("look", "filters"),
            each=filter_images,
            differences=("all filters of the layer are drawn, starting from grey images (in the fork, from noise)",),
        ),
        "filter_comp": COMPARE,
        "filter_comp_plot": replace(
            COMPARE, differences=("the comparison is computed again, because one command computes and draws it",)
        ),
    },
    default_mode="filter_vis",
)
