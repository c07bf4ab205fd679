"""`ratrainc run` whose ranks have a fault: run by benchmarks/faults.py in the place of the real command.

    python benchmarks/faulty_ranks.py '{"kind": "kill", ...}' run FILE.rtx --engine mpi ...

A fault happens on one rank at one instruction: stage, replica, tensor-parallel rank, step, engine, and index into that engine's stream.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.kinds import DIRECTIONS
from ratrain.ratrainc.cli import main
from ratrain.targets.runtime.ranks.engine import RankEngine
from ratrain.targets.runtime.ranks.processes import RankProcesses

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.ranks.collectives import Phases


@frozen
class Fault:
    kind: str
    stage: int
    replica: int
    step: int
    engine: str = "compute"
    index: int = 0
    peer: int = 0
    seconds: float = 0.0
    factor: float = 1.0
    path: str = ""
    left: int = 0


FAULT = Fault(**json.loads(sys.argv[1]))


class FaultyEngine(RankEngine):
    """An engine that meets the fault where it is told to."""

    is_faulty = False

    def begin(self, rank: RankExecutor, engine: Engine, instruction: Instruction) -> None:
        super().begin(rank, engine, instruction)
        here = rank.place == (FAULT.stage, FAULT.replica, FAULT.peer)
        index = rank.completed[engine] % len(rank.stage.streams[engine])
        self.is_faulty = here and (self.step, engine.value, index) == (FAULT.step, FAULT.engine, FAULT.index)
        self.is_slow = here and FAULT.kind == "slow" and self.step >= FAULT.step
        self.begun = time.perf_counter()
        if not self.is_faulty:
            return
        sys.stderr.write(f"FAULT {FAULT.kind} at {time.time()} in {instruction.title}\n")
        sys.stderr.flush()
        if FAULT.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif FAULT.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif FAULT.kind == "hang":
            while True:
                time.sleep(1)
        elif FAULT.kind == "fill":
            fill_disk(Path(FAULT.path), FAULT.left)

    def complete(self, rank: RankExecutor, engine: Engine, instruction: Instruction) -> None:
        if self.is_slow and engine is Engine.COMPUTE:
            time.sleep((FAULT.factor - 1) * (time.perf_counter() - self.begun))
        if self.is_faulty and FAULT.kind == "nan" and engine is Engine.COMPUTE:
            for operand in instruction.operands:
                if rank.stage.tensors[operand.tensor].kind is StateKind.GRAD:
                    rank.views[operand.tensor].reshape(-1)[0] = float("nan")
        super().complete(rank, engine, instruction)

    def phases(self, instruction: Instruction) -> Phases | None:
        phases = super().phases(instruction)
        is_message = DIRECTIONS[instruction.keyword] is not None
        return self.disturbed(phases) if self.is_faulty and is_message and phases is not None else phases

    def disturbed(self, message: Phases) -> Phases:
        """A message that is lost or delayed."""
        if FAULT.kind == "lose":
            return
        if FAULT.kind == "delay":
            end = time.time() + FAULT.seconds
            yield [_Late(end)]
        yield from message


def fill_disk(folder: Path, left: int) -> None:
    """Write a file to the disk of a folder, so that this many bytes are left."""
    disk = os.statvfs(folder)
    with (folder / "filler").open("wb") as filler:
        filler.write(bytes(disk.f_bavail * disk.f_frsize - left))


@frozen
class _Late:
    """A request that is done at a time."""

    end: float

    def test(self) -> bool:
        return time.time() >= self.end


if __name__ == "__main__":
    RankProcesses.engine_class = FaultyEngine
    sys.exit(main(sys.argv[2:]))
