"""Writes the tables beside this file: the schedules of PyTorch's own classes, as they write them. Needs PyTorch, which no test does.

    python tests/data/torch_schedules/make.py

For 2 to 4 ranks P with 2 or 3 stages each (two where a schedule has no other) and 2 P micro-batches, the fewest that all of them take.
Each comes compute only, and lowered by PyTorch: with messages, gathers and reductions.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent


def main() -> None:
    """Write every table."""
    from torch.distributed.pipelining import schedules

    classes = {
        "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, (2, 3)),
        "interleaved-zero-bubble": (schedules.ScheduleInterleavedZeroBubble, (2, 3)),
        "looped-bfs": (schedules.ScheduleLoopedBFS, (2, 3)),
        "zbv": (schedules.ScheduleZBVZeroBubble, (2,)),
        "dual-pipe-v": (schedules.ScheduleDualPipeV, (2,)),
    }
    for name, (schedule, chunk_counts) in classes.items():
        for ranks in (2, 3, 4):
            for chunks in chunk_counts:
                made = schedule(_stages(ranks, chunks), 2 * ranks)
                for form in ("compute_only", "compute_comms"):
                    lowered = "-lowered" if form == "compute_comms" else ""
                    made._dump_csv(str(HERE / f"{name}-{ranks}x{chunks}{lowered}.csv"), form)


def _stages(ranks: int, chunks: int) -> list[object]:
    """Stages of the first rank, as far as a schedule that is not run asks them."""
    return [
        SimpleNamespace(
            stage_index=chunk * ranks,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_first=chunk == 0,
            is_last=False,
            submod=None,
            stage_index_to_group_rank={},
        )
        for chunk in range(chunks)
    ]


if __name__ == "__main__":
    main()
