"""python -m bestiary.zoo RUN NAME: put a run's newest weights into the zoo."""

import sys

from bestiary import zoo
from bestiary.errors import UserError
from bestiary.runs import checkpoints
from bestiary.runs.folder import open_run

if len(sys.argv) != 3:
    sys.exit(__doc__)
try:
    run = open_run(sys.argv[1])
    print(zoo.ship(run.path, checkpoints.choose(run.path).path, sys.argv[2]))
except UserError as error:
    sys.exit(str(error))
