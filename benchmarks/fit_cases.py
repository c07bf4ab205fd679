"""Predicted against published bytes of a GPU under public frameworks: peaks by counter, and what fits.

    python benchmarks/fit_cases.py [cases | tables] [--half fit | held-out] [--owners ID]

`cases` reads benchmarks/published/fit-cases.csv: runs of many frameworks, in two halves. `tables` reads the peaks of benchmarks/published whose runs are Megatron-LM's or torchtitan's. `--owners` prints what holds the bytes of one row at its fullest moment.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields, frozen

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention, Checkpointing, Experts, Job, Loss, Sharding
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.refusals import refusal

if TYPE_CHECKING:
    from enum import Enum

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.fit.holdings.terms import RankBytes

PUBLISHED = Path(__file__).resolve().parent / "published"
ENUMS: Mapping[str, type[Enum]] = {
    "sharding": Sharding,
    "checkpointing": Checkpointing,
    "attention": Attention,
    "loss": Loss,
    "experts": Experts,
}
CONTEXTLESS = 2**30 // 2
"""Bytes of a card that no process gets (driver, ECC): 80 GB cards show 79.2 GiB, 24 GB cards 23.65; about half a GiB."""
BAND = 0.05


@frozen
class Case:
    """A published run: its job, its peak or outcome, and the counter that the peak was read from."""

    id: str
    half: str
    job: Job
    counter: str
    peak_bytes: int | None
    fits: bool | None
    """None if a peak is published: then it ran"""

    def predicted(self, ranks: tuple[RankBytes, ...]) -> int:
        """Return the predicted bytes of the counter."""
        ranks = ranks[-1:] if "last stage" in self.counter else ranks
        if self.counter.startswith("allocated"):
            return max(each.peak_bytes for each in ranks)
        if self.counter == "reserved":
            return max(
                each.peak_bytes + sum(more.bytes for more in each.overhead if more.name.startswith("allocator"))
                for each in ranks
            )
        return max(each.reserved_bytes for each in ranks)


def model_of(given: Mapping[str, Any] | None) -> ModelConfig | None:
    if given is None:
        return None
    changed = {name: value for name, value in given.items() if name != "preset"}
    if "hidden_size" in changed and "head_dim" not in changed:
        changed["head_dim"] = (
            128
            if changed["hidden_size"] % changed["heads"] == 0 and given["preset"] != "gpt2"
            else changed["hidden_size"] // changed["heads"]
        )
    return evolve(load_model(given["preset"]), **changed)


def cases() -> Iterator[Case]:
    """Yield the rows of fit-cases.csv."""
    for row in _rows("fit-cases"):
        given = json.loads(row["job"])
        counter, device = given.pop("counter"), given.pop("device_gb") * 2**30
        model = model_of(given.pop("model", None))
        known = {each.name for each in fields(Job)}
        assert given.keys() <= known, given.keys() - known
        values = {name: ENUMS[name](value) if name in ENUMS else value for name, value in given.items()}
        if adapter := values.pop("adapter", None):
            values["adapter"] = Adapter(**{**adapter, "targets": tuple(adapter["targets"])})
        job = Job(
            **{
                "model_name": row["model"],
                "model": model,
                "seq_len": None,
                "micro_batch_size": None,
                "gradient_accumulation": None,
                "device_bytes": device,
            }
            | values
        )
        peak = int(row["peak_bytes"]) if row["peak_bytes"] else None
        yield Case(row["id"], row["split"], job, counter, peak, None if peak else row["fits"] == "yes")


def _rows(table: str) -> Iterator[dict[str, str]]:
    lines = (PUBLISHED / f"{table}.csv").read_text(encoding="utf-8").splitlines()
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))


MEGATRON = {
    "weight_dtype": "bf16",
    "compute_dtype": "bf16",
    "gradient_dtype": "f32",
    "reduce_dtype": "f32",
    "master_dtype": "f32",
    "optimizer": "adamw-fused",
    "loss": Loss.VOCAB_PARALLEL,
}
TITAN = {
    "sharding": Sharding.FSDP2,
    "compute_dtype": "bf16",
    "optimizer": "adamw-fused",
    "checkpointing": Checkpointing.OPS,
    "loss": Loss.UPCAST,
    "sizes": {"compile_loss": 0},  # as train.py of that commit has it
}
ACCOUNTED = {"account_for_embedding_in_pipeline_split": 1, "account_for_loss_in_pipeline_split": 1}
TABLES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "b200-memory": (
        "megatron-lm",
        "allocated",
        {
            **MEGATRON,
            "sharding": Sharding.DISTRIBUTED_OPTIMIZER,
            "attention": Attention.FLASH,
            "sequence_sharding": True,
        },
    ),
    "torchtitan-h100": ("torchtitan", "reserved", TITAN),
    # the papers trained GPTs of Megatron-LM with its default dropout of 0.1
    "zero-bubble-memory": (
        "megatron-lm",
        "allocated",
        {**MEGATRON, "attention": Attention.EAGER, "dropout": 0.1, "sizes": ACCOUNTED},
    ),
    "vocabulary-memory": (
        "megatron-lm",
        "allocated",
        {**MEGATRON, "attention": Attention.FLASH, "dropout": 0.1, "gradient_dtype": "bf16"},
    ),
}


def tables() -> Iterator[Case]:
    """Yield the peaks of other tables that a job can say."""
    for table, (framework, counter, settings) in TABLES.items():
        for row in _rows(table):
            if not row["peak_bytes"]:
                continue
            name = row["model"]
            model = load_model(str(PUBLISHED / name) if name.endswith(".json") else name)
            tp, pp, dp = (int(row.get(key) or 1) for key in ("tp", "pp", "dp"))
            job = Job(
                framework,
                model.name,
                model,
                seq_len=int(row["seq_len"]),
                micro_batch_size=int(row["micro_batch_size"]),
                gradient_accumulation=int(row["micro_batches"]),
                devices=tp * pp * dp,
                tp=tp,
                pp=pp,
                compiled="compile" in (row.get("note") or ""),
                **settings,
            )
            if tp == 1:
                job = evolve(job, sequence_sharding=False)
            yield Case(row["id"], table, job, counter, int(row["peak_bytes"]), None)


def verdict(case: Case, ranks: tuple[RankBytes, ...]) -> str:
    """Return the verdict on fitting a card of the job's size, `close` within the band."""
    assert case.job.device_bytes is not None
    usable = case.job.device_bytes - CONTEXTLESS
    needed = max(each.reserved_bytes for each in ranks)
    ran = case.fits is not False
    if abs(needed / usable - 1) <= BAND:
        return "close"
    return "right" if (needed <= usable) == ran else ("false alarm" if ran else "miss")


def show(chosen: list[Case], owners: str | None) -> None:
    errors: dict[str, list[float]] = {}
    verdicts: dict[str, Counter[str]] = {}
    refused: dict[str, Counter[str]] = {}
    for case in chosen:
        reason = refusal(case.job)
        if reason:
            refused.setdefault(case.half, Counter())[reason.partition(":")[0]] += 1
            print(f"{case.id:42} {case.half:20} refused: {reason}")
            continue
        ranks = holdings(case.job)
        needed = case.predicted(ranks)
        text = f"{case.id:42} {case.half:20} {case.counter:22} {needed / 1e9:8.2f} GB"
        if case.peak_bytes:
            error = needed / case.peak_bytes - 1
            errors.setdefault(case.half, []).append(abs(error))
            text += f" {case.peak_bytes / 1e9:8.2f} published {error:+7.1%}"
        else:
            text += f" {'ran' if case.fits else 'ran out of memory':27}"
        if case.job.device_bytes:
            judged = verdict(case, ranks)
            verdicts.setdefault(case.half, Counter())[judged] += 1
            text += f" {judged}"
        print(f"{text}  {max(ranks, key=lambda each: each.peak_bytes).moment}")
        if owners == case.id:
            for rank in ranks:
                print(f"    {rank.name}: {rank.peak_bytes:,} {rank.moment}")
                for each in (*rank.owners, *rank.overhead):
                    print(f"        {each.bytes:18,} {each.name}")
                for moment in rank.moments:
                    print(f"        {moment.bytes:18,} {moment.name}")
    print()
    for half in dict.fromkeys(case.half for case in chosen):
        if half in errors:
            print(
                f"{half}: {len(errors[half])} peaks, median error {statistics.median(errors[half]):.1%}, largest {max(errors[half]):.1%}"
            )
        for title, counts in (("verdicts", verdicts), ("refused", refused)):
            if half in counts:
                print(f"{half}: {title}: {', '.join(f'{count} {name}' for name, count in counts[half].most_common())}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("cases", "tables"), default="cases")
    parser.add_argument("--half", choices=("fit", "held-out"))
    parser.add_argument("--owners", metavar="ID")
    given = parser.parse_args(arguments)
    every = cases() if given.what == "cases" else tables()
    show([each for each in every if given.half in (None, each.half)], given.owners)


if __name__ == "__main__":
    main()
