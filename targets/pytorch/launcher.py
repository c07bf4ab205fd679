"""The agent of torchrun for `ratrainc launch`: it passes on the ranks' exit code, and prints nothing that they print.

Example: `python -P -m ratrain.targets.pytorch.launcher 4 python -m ratrain run FILE.rtx --engine torch`
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
    """Start processes of a command on this machine, wait for them and return an exit code.

    It is 0 if all succeeded, else the first positive code of a failed process, or 1 if signals ended all that failed;
    128 + n if signal n ends this launcher. `words` are the number of processes, then the command.
    """
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
    """Return the first positive exit code of failed processes; 1 if all were ended by signals (negative codes)."""
    return next((code for code in codes if code > 0), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
