"""The kernel set `torch-triton`: that of tensors, with fused kernels for work that goes over memory once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.program.per_kernel import PerKernel
from ratrain.targets.pytorch.device.device_kernels import DEVICE_PLANS, TorchDevice
from ratrain.targets.pytorch.triton.triton_activations import TritonActivations
from ratrain.targets.pytorch.triton.triton_adamw import TritonAdamW, adamw_plan
from ratrain.targets.pytorch.triton.triton_attention import (
    TritonAttention,
    fused_backward_plan,
    fused_forward_plan,
    fused_partial_backward_plan,
    fused_partial_forward_plan,
)
from ratrain.targets.pytorch.triton.triton_common import interpreted
from ratrain.targets.pytorch.triton.triton_experts import TritonExperts, fused_rows_plan, fused_sums_plan
from ratrain.targets.pytorch.triton.triton_head import TritonHead, fused_head_plan
from ratrain.targets.pytorch.triton.triton_norms import TritonNorms, layer_backward_plan, rms_backward_plan
from ratrain.targets.pytorch.triton.triton_rope import rotate
from ratrain.targets.pytorch.triton.triton_router import (
    TritonRouter,
    fused_group_plan,
    fused_route_backward_plan,
    fused_route_forward_plan,
)
from ratrain.targets.pytorch.triton.triton_sums import (
    TritonSums,
    fused_column_sum_plan,
    fused_mean_plan,
    told_plan,
)
from ratrain.targets.pytorch.triton.triton_tables import TritonTables

if TYPE_CHECKING:
    import torch

    from ratrain.targets.program.kernel_options import RopeOptions
    from ratrain.targets.pytorch.device.device_common import Array
    from ratrain.targets.pytorch.device.device_rope import RotaryTurn
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan

_WITHOUT_SCRATCH = (
    *("rope", "rmsnorm_forward", "head_norm_forward", "layernorm_forward", "attention_delta"),
    *("embedding_backward", "expert_gradients", "choice_sums"),
    *(
        f"{name}_{way}"
        for name in ("swiglu", "geglu", "gelu", "relu2", "weighted_swiglu")
        for way in ("forward", "backward")
    ),
)


def _nothing(**_: object) -> Plan:
    """Plan no scratch."""
    return []


class TorchTriton(
    TritonNorms,
    TritonActivations,
    TritonAttention,
    TritonTables,
    TritonRouter,
    TritonExperts,
    TritonHead,
    TritonAdamW,
    TritonSums,
    TorchDevice,
):
    """`TorchDevice` with attention, norms, activations, experts, passes over logits, tables, sums and AdamW in Triton.

    Sums over rows have an order given by the number of rows, and nothing is added atomically: two calls with the same
    values and addresses give the same bits. The order within a row is the compiler's, by the alignment of the operands.
    """

    name = "torch-triton"
    plans = PerKernel(
        "scratch in 'torch-triton'",
        {
            **DEVICE_PLANS,
            **dict.fromkeys(_WITHOUT_SCRATCH, _nothing),
            **dict.fromkeys(("rmsnorm_backward", "head_norm_backward"), rms_backward_plan),
            "layernorm_backward": layer_backward_plan,
            **dict.fromkeys(("head_forward", "head_backward", "head_backward_from_logits"), fused_head_plan),
            "adamw": adamw_plan,
            "all_finite": told_plan,
            "column_sum": fused_column_sum_plan,
            "mean_of_replicas": fused_mean_plan,
            "route_forward": fused_route_forward_plan,
            "route_backward": fused_route_backward_plan,
            "group_rows": fused_group_plan,
            "expert_rows": fused_rows_plan,
            "expert_sums": fused_sums_plan,
            "attention_forward": fused_forward_plan,
            "attention_backward": fused_backward_plan,
            "attention_partial_forward": fused_partial_forward_plan,
            "attention_partial_backward": fused_partial_backward_plan,
        },
        never=("zero", "cast", "group_columns", "add_rows", "sigmoid_forward"),
    )

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Make the set for a device.

        Raises `DiagnosticError` RT093 if PyTorch finds no such device, RT004 if Triton does not compile for it.
        """
        super().__init__(device)
        if self.device.type != "cuda" and not interpreted():
            fail(
                "RT004",
                f"the kernel set '{self.name}' is compiled for GPUs of NVIDIA, not for the device '{self.device}'",
                help="use --kernels torch-device, or set TRITON_INTERPRET=1 to have Triton interpret it, which is slow",
            )

    def turn_rows(self, x: Array, turn: RotaryTurn, scratch: Scratch, given: RopeOptions) -> None:
        """Rotate x [tokens, heads * head_dim] in place."""
        rotate(x, turn, heads=given.heads, head_dim=given.head_dim, seq_len=given.seq_len)
