"""Memory of a rank that a plan's tensors may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import Note, fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.ratrain_ir.topology import Mesh, Topology
    from ratrain.targets.machine.machine import Machine


def mesh_capacity(machine: Machine, mesh: Mesh, *, tied: bool) -> Capacity:
    """Return the DDR of a rank of a mesh on a machine.

    It is that of the stage with most communicators, so that one number holds for all stages.
    """
    return machine.capacity(mesh.most_communicators(tied=tied))


def capacity_of(machine: Machine, topology: Topology) -> Capacity:
    """Return the DDR of a rank of a model's plan.

    Raises `DiagnosticError` RT053 where overheads leave nothing of it.
    """
    capacity = mesh_capacity(machine, topology, tied=topology.model.tied_embeddings)
    if not capacity.left:
        fail(
            "RT053",
            f"the machine '{machine.name}' has nothing left for tensors: overheads take all of its "
            f"{capacity.installed} bytes",
            notes=[Note(str(capacity.account))],
            help="lower the overheads in the machine's file, or plan for more memory (--capacity)",
        )
    return capacity
