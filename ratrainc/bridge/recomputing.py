"""Recomputation of a schedule, in the few words that other frameworks have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import frozen

from ratrain.passes.pipeline_text import parse_pipeline, pass_text
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.ops.compute import Recompute

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module


@frozen
class Recomputing:
    """Layers that a schedule computes again: none, each from its input, or something that no other framework says."""

    kind: Literal["none", "full", "other"]
    said: str = ""
    """the passes that decide it; empty: none"""
    assumed: bool = False
    """true if no pass has decided it: nothing is computed again so far"""


UNSAID = Recomputing("none", assumed=True)
"""The assumption for a plan, which does not say what is computed again."""


def recomputing(module: Module) -> Recomputing:
    """Return what a module computes again: by its ops if nothing, else by its passes.

    A pass that chooses by bytes may have chosen nothing. Raises `DiagnosticError` if the pipeline is no pipeline.
    """
    passes = [each for each in parse_pipeline(module.pipeline) if isinstance(each, RecomputePass | JointOrderPass)]
    said = ",".join(pass_text(each) for each in passes)
    if not any(isinstance(op, Recompute) for stage in module.stages for op in stage.ops):
        return Recomputing("none", said, assumed=not module.pipeline)
    full = {each.policy for each in passes} - {"none"} == {"full"}
    return Recomputing("full" if full else "other", said)
