"""LLaMA-2-7B at 256 to 1024 clusters against the published throughput; published peaks; updates on the host and on the compute engine.

    python benchmarks/weak_scaling.py scaling | uneven | cause | memory | update

`scaling` fits one constant to the first published point and predicts the other three. `uneven` fits none: it takes ranks that differ by an
assumed 1 %. `cause` asks what could explain the
difference that is left; it predicts nothing. All times are simulated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Location
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.calibration.calibration_report import Calibration, calibrate
from ratrain.ratrainc.calibration.fitting import with_values
from ratrain.ratrainc.calibration.measured_rows import MeasuredRow
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, Strategy, strategy
from ratrain.ratrainc.planner.search.plan_evaluation import Task
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PUBLISHED = {256: 29_069.73, 512: 57_558.07, 768: 85_465.01, 1024: 112_790.55}
"""Tokens/s of LLaMA-2-7B by clusters (RATrain, arXiv 2606.10415; the last also in its abstract)."""
PEAKS = {"llama-2-7b": ("llama-2-7b-8.toml", 19.57), "baichuan2-13b": ("baichuan2-13b-16.toml", 19.06)}
"""The smallest plans and their published peaks a cluster, in GB of 10^9 bytes."""
POLICIES = {"auto": "policy=auto", "fixed: all of it, inline": "policy=full placement=inline"}
"""What the planner keeps, and the one policy under which published peaks are compared."""
FITTED = {"mt3000": "gemm_efficiency", "mt3000-tiles": "ddr_bandwidth"}
"""The constant of each machine file that is fitted. Where tile schedules give the times, efficiency is not a constant."""
OURS = strategy(DEFAULT_STRATEGY)


def plan_of(clusters: int) -> Plan:
    """The example plan with as many replicas as there is room for."""
    plan = load_plan(str(EXAMPLES / "llama-2-7b-256.toml"), load_model("llama-2-7b"))
    return evolve(plan, dp=clusters // plan.pp)


def measured_rows(plans: dict[int, Plan], machine: Machine, ran_under: Strategy) -> list[MeasuredRow]:
    """The published points under plans of so many clusters."""
    model = load_model("llama-2-7b")
    rows = []
    for clusters, plan in plans.items():
        task = Task(model, *ran_under.applied(plan, model, machine), machine)
        rows.append(MeasuredRow(task, plan.tokens_per_step / PUBLISHED[clusters], "", str(clusters)))
    return rows


def fit_first(plans: dict[int, Plan], machine: Machine, ran_under: Strategy) -> Calibration:
    """One constant fitted to the first point, the others predicted."""
    rows = measured_rows(plans, machine, ran_under)
    held = [i > 0 for i in range(len(rows))]
    return calibrate(rows, machine, [FITTED[machine.name]], held, Location("the published throughput", 1))


def show(calibration: Calibration, plans: dict[int, Plan]) -> None:
    """Print the points: throughput, error, efficiency."""
    first = None
    for (clusters, plan), seconds in zip(plans.items(), calibration.predicted, strict=True):
        rate = plan.tokens_per_step / seconds
        first = first or rate / clusters
        target = PUBLISHED[clusters]
        published = target / clusters / (PUBLISHED[256] / 256)
        print(
            f"  {clusters:5d} clusters: {rate:11,.2f} tokens/s, published {target:11,.2f}: {100 * (rate / target - 1):+.2f} %;"
            f" efficiency {100 * rate / clusters / first:.2f} %, published {100 * published:.2f} %"
        )


def scaling() -> None:
    """Fit to 256 clusters, predict the rest, on each machine file; print every constant and its certainty."""
    plans = {clusters: plan_of(clusters) for clusters in PUBLISHED}
    for name, constant in FITTED.items():
        start = load_machine(name)
        calibration = fit_first(plans, start, OURS)
        values = f"{start[constant]:.4g} -> {calibration.machine[constant]:.4g}"
        print(f"{name}: [{constant}] {values}, fitted to the point at 256 clusters")
        show(calibration, plans)
        for key, each in calibration.machine.constants.items():
            print(f"    {key} = {each.value:g} {each.unit} ({each.certainty})")


def uneven() -> None:
    """The points on clusters that compute unequally fast, nothing fitted."""
    model, machine = load_model("llama-2-7b"), load_machine(str(EXAMPLES / "mt3000-uneven.toml"))
    for clusters, published in PUBLISHED.items():
        plan = plan_of(clusters)
        seconds = api.simulate(api.emit(api.compile(model, plan, machine=machine, passes=OURS.passes))).step_seconds
        rate = plan.tokens_per_step / seconds
        print(
            f"  {clusters:5d} clusters: {seconds:.2f} s, {rate:11,.2f} tokens/s: {100 * (rate / published - 1):+.2f} %"
        )


def cause() -> None:
    """The same with other plans, strategies and link latencies: how large each effect could be."""
    usual = {clusters: plan_of(clusters) for clusters in PUBLISHED}
    each = {clusters: evolve(plan, zero=2, reduce="each-micro-batch") for clusters, plan in usual.items()}
    machine = load_machine("mt3000")
    variants: list[tuple[str, dict[int, Plan], str, Machine]] = []
    for what, plans in (("ZeRO-1, reduced once a step", usual), ("ZeRO-2, reduced each micro-batch", each)):
        variants.append((f"{what}, baseline-1f1b", plans, strategy("baseline-1f1b"), machine))
        for latency in (10e-6, 100e-6, 1e-3, 5e-3):
            slower = with_values(machine, ["link_latency"], [latency], "tried")
            variants.append((f"{what}, ratrain, {latency * 1e6:g} us a message", plans, OURS, slower))
    for what, plans, ran_under, tried in variants:
        print(what)
        try:
            calibration = fit_first(plans, tried, ran_under)
        except DiagnosticError as error:
            print(f"  {error.diagnostics[0].message}")
            continue
        print(f"  [gemm_efficiency] {calibration.machine['gemm_efficiency']:.4f}")
        show(calibration, plans)


def memory() -> None:
    """Peak bytes of the smallest published plans, with recovery as the planner chooses it and under the fixed policy."""
    for name, (file, published) in PEAKS.items():
        for policy, options in POLICIES.items():
            passes = f"place-1f1b,joint-order{{{options}}},allocate-ddr"
            try:
                module = api.compile(name, str(EXAMPLES / file), passes=passes)
            except DiagnosticError as error:
                print(f"{name}, recovery {policy}: {error.diagnostics[0].message}")
                continue
            program = api.emit(module)
            figures = api.simulate(program)
            peaks = [stage.peak_bytes / 1e9 for stage in figures.stages]
            arena = max(stage.arena_bytes for stage in figures.stages) / 1e9
            peak = max(peaks)
            print(
                f"{name}, recovery {policy}: peak {peak:.2f} GB (stage {peaks.index(peak)}), arena {arena:.2f} GB,"
                f" published {published}: {100 * (peak / published - 1):+.1f} %; {figures.step_seconds:.2f} s a step"
            )


def update() -> None:
    """Step time of 7B with updates on the compute engine and on the host, and the update itself of each stage."""
    model = load_model("llama-2-7b")
    for file in ("llama-2-7b-8.toml", "llama-2-7b-256.toml"):
        for engine in (Engine.COMPUTE, Engine.HOST):
            machine = evolve(load_machine("mt3000"), update_engine=engine)
            for name in (DEFAULT_STRATEGY, "baseline-1f1b"):
                passes = strategy(name).passes
                plan = load_plan(str(EXAMPLES / file), model)
                try:
                    module = api.compile(model, plan, machine=machine, passes=passes)
                except DiagnosticError as error:
                    print(f"{file}, {name}, updates on {engine.value}: {error.diagnostics[0].message}")
                    continue
                figures = api.simulate(api.emit(module, machine=machine), machine=machine)
                tails = ", ".join(f"{stage.exposed_tail_seconds:.3f}" for stage in figures.stages)
                print(
                    f"{file}, {name}, updates on {engine.value}: {figures.step_seconds:.3f} s a step,"
                    f" {figures.tokens_per_second:,.0f} tokens/s, exposed tails {tails} s"
                )


if __name__ == "__main__":
    parts = {"scaling": scaling, "uneven": uneven, "cause": cause, "memory": memory, "update": update}
    for part in sys.argv[1:] or ["scaling"]:
        if part not in parts:
            sys.exit(f"'{part}' is none of {', '.join(parts)}")
        parts[part]()
