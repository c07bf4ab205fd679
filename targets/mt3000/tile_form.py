"""The on-chip form `tiles`: tile schedules as programs see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ratrain.targets.mt3000.tiles.calls import tiles_problem
from ratrain.targets.mt3000.tiles.tile_listing import tile_lines
from ratrain.targets.mt3000.tiles.tile_schedule import TileSchedule, tiles_from_json
from ratrain.targets.mt3000.tiles.verifier import structure_problem
from ratrain.targets.mt3000.tiling.core import cluster_of
from ratrain.targets.program.on_chip import Constants, OnChipForm

if TYPE_CHECKING:
    from ratrain.targets.program.kernel import Types
    from ratrain.targets.program.routine import OnChipSchedule, Step


class TileForm(OnChipForm):
    """Interpreter of tile schedules for programs."""

    title: ClassVar[str] = "tile schedules"

    def from_json(self, data: Any) -> TileSchedule:
        """Return the tile schedule of plain data, as the JSON of a program has it.

        Raises IndexError, KeyError, TypeError or ValueError where the data is no schedule, or its parts do not fit
        together.
        """
        schedule = tiles_from_json(data)
        problem = structure_problem(schedule)
        if problem is not None:
            raise ValueError(f"tiles of {schedule.kernel}: {problem}")
        return schedule

    def step_problem(self, step: Step, types: Types) -> str | None:
        """Return why the tile schedules of a step do not compute it, or None."""
        return tiles_problem(step, types)

    def lines(self, schedule: OnChipSchedule, steps: Sequence[str], core: int, limit: int) -> Iterator[str]:
        """Yield a tile schedule in words; see `OnChipForm.lines`."""
        assert isinstance(schedule, TileSchedule)
        return tile_lines(schedule, steps, core, limit)

    def cores(self, schedule: OnChipSchedule) -> int:
        """Return the number of cores that a tile schedule is for."""
        assert isinstance(schedule, TileSchedule)
        return schedule.memories.cores

    def fits(self, schedule: OnChipSchedule, constants: Constants) -> bool:
        """Return whether a tile schedule is for memories as large as a machine's."""
        try:
            return isinstance(schedule, TileSchedule) and schedule.memories == cluster_of(constants).memories
        except KeyError:  # a machine without on-chip memories
            return False
