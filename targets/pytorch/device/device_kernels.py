"""The kernel set `torch-device`: every kernel on tensors of one device, written into the tensors that are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.program.kernel_options import RopeOptions
from ratrain.targets.program.per_kernel import PerKernel
from ratrain.targets.pytorch.device import device_activations as activations
from ratrain.targets.pytorch.device import device_attention_kernels as attention
from ratrain.targets.pytorch.device import device_experts as experts
from ratrain.targets.pytorch.device import device_flat as flat
from ratrain.targets.pytorch.device import device_nf4 as nf4
from ratrain.targets.pytorch.device import device_norms as norms
from ratrain.targets.pytorch.device import device_products as products
from ratrain.targets.pytorch.device import device_quantised as quantised
from ratrain.targets.pytorch.device import device_router as router
from ratrain.targets.pytorch.device import device_scores as scores
from ratrain.targets.pytorch.device import device_tables as tables
from ratrain.targets.pytorch.device.device_adamw import adamw_plan
from ratrain.targets.pytorch.device.device_common import check_documents
from ratrain.targets.pytorch.device.device_head import DeviceHead, head_plan
from ratrain.targets.pytorch.device.device_memory import DeviceMemory
from ratrain.targets.pytorch.device.device_rope import RotaryTurn, rope_plan
from ratrain.targets.pytorch.device.device_scalars import (
    SCALARS_PLAN,
    DeviceScalars,
    ScalarKernels,
    combined_logs_plan,
    label_logits_plan,
)
from ratrain.targets.runtime.arena.scratch import plan_bytes
from ratrain.targets.runtime.kernels.shared import KernelSetBase, rope_table

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scalars import Place
    from ratrain.targets.runtime.arena.scratch import Plan

DEVICE_PLANS: dict[str, Callable[..., Plan]] = {
    "gemm": products.gemm_plan,
    "column_sum": products.column_sum_plan,
    **dict.fromkeys(("rmsnorm_forward", "head_norm_forward", "layernorm_forward"), norms.norm_forward_plan),
    **dict.fromkeys(("rmsnorm_backward", "head_norm_backward", "layernorm_backward"), norms.norm_backward_plan),
    **dict.fromkeys(("row_squares", "row_products", "summed_norm_forward"), norms.norm_forward_plan),
    "summed_norm_backward": norms.norm_backward_plan,
    "rope": rope_plan,
    "attention_forward": attention.attention_forward_plan,
    "attention_backward": attention.attention_backward_plan,
    "attention_partial_forward": attention.partial_forward_plan,
    "attention_partial_finish": attention.partial_finish_plan,
    "attention_delta": attention.delta_plan,
    "attention_partial_backward": attention.partial_backward_plan,
    "attention_scores_forward": scores.product_plan,
    "attention_softmax_forward": scores.softmax_forward_plan,
    "attention_values_forward": scores.product_plan,
    "attention_values_backward": scores.gradients_plan,
    "attention_softmax_backward": scores.softmax_backward_plan,
    "attention_scores_backward": scores.gradients_plan,
    "swiglu_forward": activations.swiglu_forward_plan,
    "swiglu_backward": activations.swiglu_backward_plan,
    "geglu_forward": activations.geglu_forward_plan,
    "geglu_backward": activations.geglu_backward_plan,
    "gelu_forward": activations.gelu_forward_plan,
    "gelu_backward": activations.gelu_backward_plan,
    "relu2_forward": activations.relu2_forward_plan,
    "relu2_backward": activations.relu2_backward_plan,
    "embedding_forward": tables.embedding_forward_plan,
    "embedding_backward": tables.embedding_backward_plan,
    "position_forward": tables.position_forward_plan,
    "position_backward": tables.position_backward_plan,
    **dict.fromkeys(("head_forward", "head_backward", "head_backward_from_logits"), head_plan),
    "add": flat.add_plan,
    "scale": flat.scale_plan,
    "adamw": adamw_plan,
    "mean_of_replicas": flat.mean_plan,
    "all_finite": flat.all_finite_plan,
    "route_forward": router.route_forward_plan,
    "route_backward": router.route_backward_plan,
    "group_rows": router.group_rows_plan,
    "expert_rows": experts.expert_rows_plan,
    "expert_sums": experts.expert_sums_plan,
    "choice_sums": experts.choice_sums_plan,
    "expert_gradients": experts.expert_gradients_plan,
    "weighted_swiglu_forward": experts.weighted_swiglu_forward_plan,
    "weighted_swiglu_backward": experts.weighted_swiglu_backward_plan,
    "sigmoid_backward": experts.sigmoid_backward_plan,
    "quantise": quantised.quantise_plan,
    "dequantise": quantised.dequantise_plan,
    "dequantise_nf4": nf4.dequantise_nf4_plan,
    "mean_of_quantised": quantised.mean_of_quantised_plan,
}


class TorchDevice(
    norms.DeviceNorms,
    activations.DeviceActivations,
    products.DeviceProducts,
    attention.DeviceAttention,
    scores.DeviceScores,
    tables.DeviceTables,
    router.DeviceRouter,
    experts.DeviceExperts,
    nf4.DeviceNf4,
    DeviceHead,
    ScalarKernels,
    KernelSetBase,
):
    """`KernelSet` whose operands are tensors on one device, and whose scratch is a `TensorScratch` there.

    No kernel asks an allocator for tensor memory. None waits for the device, except those that return a bool, which no
    step calls. So an index outside its table is only found on the CPU. Rows of one token are not summed in ascending
    order (see `device_sums`), nor are losses. Two calls with the same values give the same bits.
    """

    name = "torch-device"
    on_devices = True
    scalar_bytes = plan_bytes(SCALARS_PLAN)
    plans = PerKernel(
        "scratch in 'torch-device'",
        DEVICE_PLANS,
        never=("zero", "cast", "group_columns", "add_rows", "sigmoid_forward"),
    )

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Make the set for a device. Raises `DiagnosticError` RT093 if PyTorch finds no such device."""
        super().__init__()
        self.device = torch.device(device)
        _check_device(self.device)
        self.memory = DeviceMemory(self.device)
        self.nf4_levels = nf4.nf4_levels(self.device)
        # PyTorch multiplies 16-bit factors into float32 on CUDA only
        self.halves = self.device.type == "cuda" and products.stores_float32()
        if self.device.type == "cuda":
            # sums of products in float32: by default PyTorch allows less for some 16-bit factors
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def combined_loss_bytes(self, rows: int) -> int:
        """Return the bytes of the temporaries of `logits_of_labels` and `combine_losses`."""
        return plan_bytes([*label_logits_plan(rows), *combined_logs_plan(rows)])

    def scalars(self, blocks: Mapping[Place, Sequence[str]]) -> DeviceScalars:
        """Make the object that keeps a step's numbers on the device."""
        return DeviceScalars(self, blocks)

    def build_rope_table(self, seq_len: int, width: int, theta: float, scaling: str) -> tuple[F32, F32]:
        """Build the table on the device."""
        cos, sin = (torch.tensor(table, device=self.device) for table in rope_table(seq_len, width, theta, scaling))
        return cos, sin

    def plan_options(self) -> dict[str, Any]:
        """Return whether 16-bit factors are multiplied without conversion."""
        return {"halves": self.halves}

    def rope(self, x, *, documents=None, scratch, **options):
        given = RopeOptions(**options)
        check_documents(documents, given.seq_len, given.first_position)
        cos, sin = self._rope_rows(*given.table)
        starts = None if documents is None else documents.view(-1, given.seq_len)
        turn = RotaryTurn(cos, sin, given.first_position, starts, given.width, given.interleaved, given.inverse)
        self.turn_rows(x, turn, scratch, given)

    def turn_rows(self, x: Array, turn: RotaryTurn, scratch: Scratch, given: RopeOptions) -> None:
        """Rotate x [tokens, heads * head_dim] in place."""
        buffers = scratch.take_all(rope_plan(**asdict(given), documents=turn.documents))
        turn.rotate(x.view(-1, given.seq_len, given.heads, given.head_dim), buffers)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        there = f"it finds {found}" if found else "it finds none, or was built without CUDA"
        fail(
            "RT093",
            f"PyTorch {torch.__version__} has no device '{device}': {there}",
            help="leave --device out to run on this processor",
        )
