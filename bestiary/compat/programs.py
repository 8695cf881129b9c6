"""PROGRAMS: the original programs whose command lines `bestiary compat` accepts, by name."""

from bestiary.compat import iam, torchbeast, torchbeast_analysis, torchbeast_procgen
from bestiary.compat.flag_types import Program

PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        torchbeast.MONOBEAST,
        torchbeast.POLYBEAST,
        torchbeast.POLYBEAST_ENV,
        torchbeast.POLYBEAST_LEARNER,
        torchbeast_analysis.SALIENCY,
        torchbeast_analysis.ANALYZE_RESNET,
        torchbeast_analysis.VISUALIZE_AAA,
        torchbeast_procgen.POLYBEAST,
        torchbeast_procgen.POLYBEAST_LEARNER,
        iam.MAIN,
    )
}
