"""`compile --schedule-file`: a plan and a pipeline for the schedule table of another runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pipeline_text import parse_pipeline, pass_text
from ratrain.passes.placement.foreign_table import read_foreign_table, shape_keys, shape_of_table
from ratrain.passes.placement.place_from_file import PlaceFromFilePass
from ratrain.ratrain_ir.config.plan_text import load_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def load_plan_for_table(path: str, model: ModelConfig, table: str) -> Plan:
    """The plan of a file; what it leaves out of pp, micro_batches, chunks, layout and slices is as in a schedule table.

    Raises `DiagnosticError` for what is wrong with either; whether they fit is for the placement to say.
    """
    shape = shape_keys(shape_of_table(read_foreign_table(table)))
    return load_plan(path, model, shape=shape)


def placed_by_table(passes: str, table: str) -> str:
    """The pipeline that places a table, then runs passes.

    Raises ValueError where they place too.
    """
    placing = next((item.name for item in parse_pipeline(passes) if item.name.startswith("place-")), None)
    if placing is not None:
        raise ValueError(placing)
    own = pass_text(PlaceFromFilePass(table))
    return f"{own},{passes}" if passes.strip() else own
