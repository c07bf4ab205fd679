"""Ranks that are threads of the test's process, with communicators in memory: what `ranks` does, without a launcher."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.ranks.communicator import whole_bytes
from ratrain.targets.runtime.ranks.processes import RankProcesses
from ratrain.targets.runtime.ranks.rank_layout import RankLayout
from tests.end_to_end.tiny_runs import run_settings, stream_for
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

Parts = list[NDArray[Any]]


@define(eq=False)
class Board:
    """What the ranks of a job have handed in: messages, and their parts of collectives."""

    lock: Lock = field(factory=Lock)
    messages: defaultdict[Any, deque[bytes]] = field(factory=lambda: defaultdict(deque))
    meetings: defaultdict[Any, dict[int, Any]] = field(factory=lambda: defaultdict(dict))
    has_failed: bool = False

    def check(self) -> None:
        """Nobody waits for a rank that has failed."""
        if self.has_failed:
            raise RuntimeError("another rank has failed")


@define(eq=False)
class Pending:
    """A call that looks at the board until it can be done."""

    board: Board
    attempt: Callable[[], bool]
    is_done: bool = False

    def test(self) -> bool:
        if not self.is_done:
            self.board.check()
            with self.board.lock:
                self.is_done = self.attempt()
        return self.is_done


@define(eq=False)
class ThreadCommunicator:
    """A communicator of ranks that are threads."""

    board: Board
    name: tuple[Any, ...]
    rank: int
    size: int
    calls: int = 0

    def _meet(self, part: Any, use: Callable[[list[Any]], None]) -> Pending:
        """Hand in a part; when all have, `use` gets those of all in rank order."""
        meeting = self.board.meetings[self.name, self.calls]
        self.calls += 1
        with self.board.lock:
            meeting[self.rank] = part

        def attempt() -> bool:
            if len(meeting) < self.size:
                return False
            use([meeting[rank] for rank in range(self.size)])
            return True

        return Pending(self.board, attempt)

    tagged = True

    def for_messages(self, channels: Sequence[tuple[int, int]]) -> ThreadCommunicator:
        """These ranks: messages have tags."""
        del channels
        return self

    def isend(self, data: NDArray[Any], to: int, tag: int) -> Pending:
        self.board.messages[self.name, self.rank, to, tag].append(whole_bytes(data).tobytes())
        return Pending(self.board, lambda: True)

    def irecv(self, into: NDArray[Any], source: int, tag: int) -> Pending:
        queue = self.board.messages[self.name, source, self.rank, tag]

        def attempt() -> bool:
            if queue:
                whole_bytes(into)[:] = np.frombuffer(queue.popleft(), np.uint8)
                return True
            return False

        return Pending(self.board, attempt)

    def iallgather(self, whole: NDArray[Any], part: NDArray[Any] | None = None) -> Pending:
        out = whole_bytes(whole)
        length = out.size // self.size
        mine = out[self.rank * length : (self.rank + 1) * length] if part is None else whole_bytes(part)
        assert mine.size == length
        return self._meet(mine.copy(), lambda parts: np.concatenate(parts, out=out))

    def iallgatherv(self, whole: NDArray[Any], part: NDArray[Any], counts: Sequence[int]) -> Pending:
        assert part.size == counts[self.rank]
        return self._meet(whole_bytes(part).copy(), lambda parts: np.concatenate(parts, out=whole_bytes(whole)))

    def ialltoall(self, gathered: NDArray[Any], parts: NDArray[Any]) -> Pending:
        out = whole_bytes(gathered).reshape(self.size, -1)

        def use(given: Parts) -> None:
            for source, theirs in enumerate(given):
                out[source] = theirs[self.rank]

        return self._meet(whole_bytes(parts).reshape(self.size, -1).copy(), use)

    def ialltoallv(
        self, gathered: NDArray[Any], parts: NDArray[Any], arriving: Sequence[int], leaving: Sequence[int]
    ) -> Pending:
        ends = np.cumsum(leaving)[:-1] * parts.itemsize
        assert parts.size == sum(leaving)
        assert gathered.size == sum(arriving)

        def use(given: list[list[NDArray[np.uint8]]]) -> None:
            mine = [theirs[self.rank] for theirs in given]
            assert [len(part) for part in mine] == [count * gathered.itemsize for count in arriving]
            np.concatenate(mine, out=whole_bytes(gathered))

        return self._meet(np.split(whole_bytes(parts).copy(), ends), use)

    def iallreduce_max(self, values: NDArray[np.uint8]) -> Pending:
        return self._meet(values.copy(), lambda parts: np.copyto(values, np.max(parts, axis=0)))

    def ireduce_scatter_block(self, total: NDArray[np.float32], whole: NDArray[np.float32]) -> Pending:
        """Summed from the last rank on: an order that is not that of the ranks."""

        def use(parts: Parts) -> None:
            total.reshape(-1)[:] = sum(part.reshape(self.size, -1)[self.rank] for part in reversed(parts))

        return self._meet(whole.copy(), use)

    def ibarrier(self) -> Pending:
        return self._meet(None, lambda _: None)

    def split(self, colour: int | None) -> ThreadCommunicator | None:
        """The ranks that gave the same colour."""
        colours: list[int | None] = []
        number = self.calls
        request = self._meet((colour,), lambda given: colours.extend(each for (each,) in given))
        while not request.test():
            pass
        if colour is None:
            return None
        members = [rank for rank, other in enumerate(colours) if other == colour]
        return ThreadCommunicator(self.board, (*self.name, number, colour), members.index(self.rank), len(members))


@frozen(eq=False)
class ThreadTransport:
    """A job of so many threads, as thread `number` sees it."""

    board: Board
    number: int
    count: int
    engine: ClassVar[str] = "threads"
    launcher: str = "the test"
    description: str = "threads"

    def start_command(self, processes: int) -> str:
        return f"{processes} threads"

    def world(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self.board, (), rank, self.count)

    def abort(self, code: int) -> NoReturn:
        raise SystemExit(code)

    def close(self) -> None:
        """Nothing."""


def trained_by_threads(
    program: Program, steps: int, *, order: Any = "pp-first", reduction: Any = "ordered", **settings: Any
) -> list[TrainingRun]:
    """The run of every rank after all its steps, saved where the settings say so, by number of the process."""
    board = Board()
    layout = RankLayout.of_plan(program.plan, order)

    def train(number: int) -> TrainingRun:
        try:
            processes = RankProcesses(ThreadTransport(board, number, layout.size), layout, reduction)
            chosen = run_settings(steps, **settings)
            run = prepare(program, stream_for(program), chosen, kernel_set(chosen.execution.kernels), processes)
            list(run.steps())
            run.save()
        except BaseException:
            board.has_failed = True
            raise
        return run

    with ThreadPoolExecutor(layout.size) as pool:
        futures = [pool.submit(train, number) for number in range(layout.size)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        if failures:
            raise next((each for each in failures if str(each) != "another rank has failed"), failures[0])
        return [future.result() for future in futures]
