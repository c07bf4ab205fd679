"""What kernels cost by the roofline: the arithmetic of attention, whole and in slices, and the operands of the rest."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from attrs import fields

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.cost import copy_seconds, kernel_work
from ratrain.targets.machine.machine import Machine, parse_machine
from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.program.attention_spec import AttentionBlockSpec
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import Formal, Routine, Step

HEADS, KV_HEADS, HEAD_DIM, BATCH = 8, 2, 64, 3
CUTS = [(0, 4096), (0, 700, 1000, 4096), (0, 1024, 2048, 3072, 4096)]


def machine(bandwidth: float) -> Machine:
    """The MT-3000 with another DDR."""
    text = f'value = {bandwidth}, unit = "bytes/s", certainty = "assumed", source = "a test"'
    return parse_machine(f'base = "mt3000"\nname = "other"\nddr_bandwidth = {{ {text} }}\n', file="m.toml")


def work(kernel: str, options: dict[str, Any], on: Machine, storage: Dtype = Dtype.F16) -> ResourceWork:
    """One call on the operands it must have, of the declared shapes, without its launch."""
    sizes = {name: value for name, value in options.items() if type(value) is int}
    formals = []
    for operand in KERNELS[kernel].operands:
        if operand.optional:
            continue
        extents = []
        for dim in operand.dims:
            extent = 1
            for factor in dim.split("*"):
                extent *= sizes[factor]
            extents.append(extent)
        dtype = storage if operand.type == "s" else Dtype(operand.type)
        formals.append(Formal(operand.name, dtype, tuple(extents)))
    given = {name: value for name, value in options.items() if name in KERNELS[kernel].options}
    step = Step(kernel, {formal.name: formal.name for formal in formals}, given)
    cost = kernel_work(Routine("r", tuple(formals), (), (), 0, (step,)), step, on)
    return ResourceWork(cost.seconds - on["launch"], cost.ddr_bytes)


def block_options(first: int, last: int, start: int, stop: int, window: int | None) -> dict[str, Any]:
    options = {"batch": BATCH, "queries": last - first, "keys": stop - start, "first_query": first, "first_key": start}
    options |= {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "window": window, "alibi": False}
    assert options.keys() == {each.name for each in fields(AttentionBlockSpec)} - {
        "scale",
        "softcap",
        "all_heads",
        "first_head",
    }
    return {**options, "accumulate": True}


@pytest.mark.parametrize("window", [None, 300, 1500])
@pytest.mark.parametrize("bounds", CUTS)
def test_slices_of_an_attention_take_its_operations(bounds: tuple[int, ...], window: int | None) -> None:
    on = machine(1e30)
    whole = {"batch": BATCH, "seq_len": bounds[-1], "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    whole |= {"window": window, "alibi": False}
    for way in ("forward", "backward"):
        seconds = 0.0
        for first, last in pairwise(bounds):
            for start, stop in pairwise(bounds):
                seconds += work(f"attention_partial_{way}", block_options(first, last, start, stop, window), on).seconds
        assert seconds == pytest.approx(work(f"attention_{way}", whole, on).seconds, rel=1e-9)


@pytest.mark.parametrize("cost", ["roofline", "tiles"])
def test_bf16_takes_what_f16_takes(cost: str) -> None:
    on = parse_machine(f'base = "mt3000"\nname = "other"\ncost = "{cost}"\n', file="m.toml")
    options = {"batch": BATCH, "seq_len": 256, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    options |= {"window": None, "alibi": False}
    half, bfloat, single = (
        work("attention_forward", options, on, storage) for storage in (Dtype.F16, Dtype.BF16, Dtype.F32)
    )
    assert bfloat == half
    assert bfloat.ddr_bytes < single.ddr_bytes


def test_blocks_move_their_operands() -> None:
    on, line, wide, narrow = (
        machine(1.0),
        HEADS * BATCH * 100,
        HEADS * HEAD_DIM * BATCH * 100,
        KV_HEADS * HEAD_DIM * BATCH * 300,
    )
    block = block_options(500, 600, 200, 500, None)
    rows = {"T": BATCH * 100, "heads": HEADS, "head_dim": HEAD_DIM}
    cases = {
        "attention_partial_forward": (block, 2 * wide + 2 * 2 * narrow + 4 * wide + 2 * 4 * line),
        "attention_partial_backward": (block, 2 * 2 * wide + 2 * 2 * narrow + 4 * wide + 2 * 4 * narrow + 2 * 4 * line),
        "attention_partial_finish": (rows, 4 * wide + 2 * wide + 3 * 4 * line),
        "attention_delta": (rows, 2 * 2 * wide + 4 * line),
    }  # fmt: skip
    for kernel, (options, nbytes) in cases.items():
        found = work(kernel, options, on)
        assert found.ddr_bytes == nbytes
        assert found.seconds == pytest.approx(copy_seconds(nbytes, on))
