"""The page `annotated-schedule.md`: a whole small schedule, as the compiler writes it, with a remark where something is new."""

from __future__ import annotations

import re

from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.running.examples import example_path

_REMARKS = (
    (r"^rtir", "the version of the format"),
    (r"^module", "the model's name, and how far it is lowered: every tensor has an address"),
    (r"^  model", "the model, complete: nothing outside this file is needed"),
    (r"^  plan", "the parallel plan: 2 stages, 2 replicas, 4 micro-batches, optimizer state sharded (ZeRO 1)"),
    (r"^  target", "the machine that sized the workspace, and the bytes a stage may use"),
    (r"^  pipeline", "the passes that made this, in order"),
    (r"^  stage @0", "the first stage; every replica runs it"),
    (r"^  stage @1", "the last stage; its remarks are those that differ"),
    (
        r"^    view %w",
        "f16 parameters as kernels read them: the block's whole flat tensor; carried across the step's end",
    ),
    (r"^    master", "f32 parameters, this replica's half"),
    (r"^    moment %m1", "Adam's first moment, sharded like the master"),
    (r"^    moment %m2", "Adam's second moment"),
    (r"^    scalar %t", "updates applied to this block: overflow may skip some"),
    (r"^    scalar %scale", "the loss scale, and the steps since it changed"),
    (r"^    input", "token numbers of one micro-batch"),
    (r"^    checkpoint", "a layer's input, kept so that the layer can be recovered"),
    (r"^    boundary %x", "an activation that crosses the cut"),
    (r"^    boundary %dx", "a gradient that crosses the cut"),
    (r"^    activation %x", "a block's input inside the stage"),
    (r"^    activation %r", "an mlp's input again, recovered for its backward"),
    (r"^    activation %dx", "a gradient between two blocks"),
    (r"^    saved", "what a block's backward needs: here the normed input of attention"),
    (r"^    grad %g", "the full gradient of a block: lives from its first contribution to its reduction"),
    (r"^    grad_shard", "this replica's half of the reduced gradient"),
    (r"^    scalar %flag", "set when a contribution or the sum is not finite"),
    (r"^    scalar %overflow", "any flag of any rank"),
    (r"^    scalar %loss", "the sum of the step's token losses, f64"),
    (
        r"^    workspace %ws\.embed|^    workspace %ws\.attention\.forward",
        "scratch of a routine, live only while one of its ops runs",
    ),
    (r"^    workspace %ws\.grad-sync", "staging of collectives"),
    (r"= load_input tokens", "the host copies tokens in"),
    (r"= load_input labels", "labels, one token later"),
    (r"= forward embed", "rows of the embedding table"),
    (r"= forward attention", "writes no %s...: this layer will be recovered; what it would have saved is workspace"),
    (r"= forward mlp", "the same for the mlp"),
    (
        r"= forward head m0",
        "logits chunk by chunk, never whole; keeps the log-sum-exp; the first micro-batch begins the loss",
    ),
    (r"\+= forward head", "later ones add to the loss"),
    (r"^    send activation", "to the next stage, on the send engine, while compute goes on"),
    (r"recv gradient", "posted when the receive engine is free and these bytes are"),
    (r"recv activation", "what stage @0 sent"),
    (r"^    send gradient", "back to the stage before"),
    (r"recompute attention", "recovery from the checkpoint: what backward needs, and the mlp's input"),
    (r"recompute mlp", "from that input: what the mlp's backward needs"),
    (r"= backward mlp|= backward attention", "first contribution: '=' writes the gradient, nothing is implicitly zero"),
    (r"\+= backward mlp|\+= backward attention", "later contributions add, in ascending micro-batches"),
    (r"= backward embed m0", "the embedding's gradient; nothing is sent further"),
    (r"backward head", "logits again, chunk by chunk; the loss scale goes in here"),
    (r"^    release", "from here on these bytes may be used again, once their last accessor has completed"),
    (r"reduce_scatter", "right after its last contribution: mean over the replicas, one half each, flags with it"),
    (r"all_reduce_scalar loss", "the loss over the replicas of the last stage: what the log shows"),
    (r"all_reduce_scalar flags", "one flag for the whole job; every stage takes part"),
    (r"\+= update embed|\+= update attention", "AdamW on the half; in the order the next step needs the blocks"),
    (r"all_gather", "the view for the next step, from both halves; the next step's forward waits for nothing else"),
    (r"scale_update", "halves after an overflow; the head's next backward reads it"),
)


def page() -> str:
    """The annotated schedule as Markdown."""
    model = evolve(load_model(str(example_path("tiny.json"))), name="toy", layers=2)
    plan = Plan(pp=2, dp=2, cuts=(1,), micro_batch_size=1, micro_batches=4, seq_len=64, zero=1)
    passes = "place-1f1b,insert-prefetch,bucket-grad-sync,recompute{policy=full},allocate-ddr"
    module = api.compile(model, plan, passes=passes)
    lines = annotated(print_module(module).splitlines())
    head = (
        "# A schedule, annotated\n\nTwo stages, two replicas, four micro-batches, one layer a stage, full recomputation: "
        "the whole file as `ratrainc compile` writes it. Remarks stand where something appears for the first time; as "
        "`//` comments they are part of the language, so this text can be verified as it is.\n\n"
        "<!-- written by docs/generate.py -->\n"
    )
    return f"{head}\n```\n" + "\n".join(lines) + "\n```\n"


def annotated(lines: list[str]) -> list[str]:
    """The lines with each remark above the first line it fits."""
    left = list(_REMARKS)
    remarked: list[str] = []
    for line in lines:
        for remark in left:
            if re.search(remark[0], line):
                indent = line[: len(line) - len(line.lstrip())]
                remarked.append(f"{indent}// {remark[1]}")
                left.remove(remark)
                break
        remarked.append(line)
    return remarked
