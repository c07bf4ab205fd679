"""torchrun for `ratrainc launch`: the same agent, which passes the ranks' exit code on and says nothing that the ranks say themselves.

python -P -m ratrain.targets.pytorch.launcher 4 python -m ratrain run FILE.rtx --engine torch
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(words: Sequence[str]) -> int:
    """Start so many processes of a command on this machine; the exit code that they have chosen, or 1."""
    processes, *command = words
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--nproc-per-node", processes, "--max-restarts", "0", "--no-python", "--"]
    try:
        run.run(run.parse_args([*options, *command]))
    except ChildFailedError as error:
        return chosen_code(failure.exitcode for failure in error.failures.values())
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def chosen_code(codes: Iterable[int]) -> int:
    """Of processes that ended in failure: the code that one chose; 1 where all were ended by signals, which are below 0."""
    return next((code for code in codes if code > 0), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
