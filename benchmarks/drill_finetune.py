"""Fine-tune a little model on the device: beside a base as views and in nf4, and whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from drill_parts import Drill

_STEPS = 12
_WIDE = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}


def finetune(drill: Drill) -> None:
    """Fine-tune on the device; check that held-out losses fall, and are within 2 % of this processor's."""
    from attrs import evolve

    from ratrain import api
    from ratrain.ratrainc.choices.finetune_choice import Adapting, FinetuneChoice, Judging, Schedule
    from ratrain.ratrainc.choices.run_choices import DataChoice

    folder = drill.out / "finetune"
    model, data = _model(folder), _chats(folder)
    choice = FinetuneChoice(
        str(model),
        "",
        DataChoice((str(data),), chat_template="chatml"),
        schedule=Schedule(steps=_STEPS, lr=0.01, seq_len=128),
        judging=Judging(every=4),
        dtype="bf16",
        device=drill.device,
    )
    for name, adapting in (
        ("views", Adapting(rank=8)),
        ("nf4", Adapting(rank=8, base="nf4")),
        ("whole", Adapting(whole=True)),
    ):
        done = api.finetune(evolve(choice, output=str(folder / name), adapting=adapting))
        losses = [step.eval_loss for step in done.run.steps if step.eval_loss is not None]
        print(f"{name}: held-out loss {' -> '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
        drill.check(losses[-1] < losses[0], f"{name}: the held-out loss does not fall")
        drill.figures[name] = losses
        if not drill.on_host:
            here = api.finetune(evolve(choice, output=str(folder / f"{name}-here"), adapting=adapting, device="cpu"))
            host = [step.eval_loss for step in here.run.steps if step.eval_loss is not None]
            worst = max(abs(one / other - 1) for one, other in zip(losses, host, strict=True))
            print(f"{name}: at most {100 * worst:.2f} % from the losses of this processor", flush=True)
            drill.check(worst < 0.02, f"{name}: losses are {100 * worst:.1f} % from those of this processor")


def _model(folder: Path) -> Path:
    """Write a little model that has seen some text, with a tokenizer of bytes."""
    from ratrain import api
    from ratrain.ratrainc.running.examples import example_path
    from ratrain.targets.runtime.settings import RunSettings, Saving

    folder.mkdir(parents=True)
    config = json.loads(example_path("tiny.json").read_text()) | _WIDE
    (folder / "m.json").write_text(json.dumps(config))
    plan = "[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 2\nmicro_batches = 4\nseq_len = 128\n"
    (folder / "p.toml").write_text(plan + "[optimizer]\nlr = 3e-3\n")
    program = api.emit(api.compile(str(folder / "m.json"), str(folder / "p.toml")))
    api.run(program, RunSettings(10, saving=Saving(str(folder / "state"))))
    api.export_weights(str(folder / "state"), str(folder / "hf"))
    return folder / "hf"


def _chats(folder: Path) -> Path:
    says = [(f"{a}+{b}?", f"{a + b}") for a in range(12) for b in range(12)]
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in says]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    return path
