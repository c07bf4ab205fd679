"""Options of the commands that train, and of those about models, programs and this machine."""

from __future__ import annotations

from option import JSON, SETTINGS, Command, Option

_TRACKERS = "ratrain.ratrainc.running.training:check_trackers"
_PAIRS = "x.rtx --steps 2 --log l.jsonl --data pairs.jsonl --train-on completion"
_CHATS = "x.rtx --steps 2 --log l.jsonl --data chats.jsonl --train-on answers --chat-template chatml"
_TUNE = "--model w --data chats.jsonl -o ft --chat-template chatml"
_TUNE_PAIRS = "--model w --data pairs.jsonl -o ft --seq-len 64 --steps 2"
_GENERATION = "ratrain.ratrainc.running.generation:generate"
_HOLDERS = "ratrain.ratrainc.running.job:job_of"
_WATCH = "ratrain.ratrainc.watch.watching:watch"

TRAINING = {
    "generate": Command(
        "ckpt --prompt words --tokens 6",
        {
            "--prompt": Option("what the text begins with", "--prompt letters"),
            "--prompt-tokens": Option("the same as numbers", "--prompt-tokens 1,2", "ckpt --tokens 6 --eos none"),
            "--chat": Option("what a user says, in place of a prompt", "--chat words", "ckpt --chat-template chatml"),
            "--chat-template": Option(
                "the template of a chat",
                "--chat-template chatml",
                "ckpt --chat words --tokens 6",
                idle=("ckpt --prompt words",),
            ),
            "--init": Option("the weights that adapters belong to", "--init w", "tuned --prompt words --tokens 6"),
            "--tokens": Option("how long it gets", "--tokens 9"),
            "--temperature": Option("draws tokens", "--temperature 5"),
            "--top-p": Option(
                "of the likeliest only",
                "--top-p 0.01",
                "ckpt --prompt words --temperature 5",
                idle=("ckpt --prompt words",),
            ),
            "--seed": Option(
                "which draws", "--seed 4", "ckpt --prompt words --temperature 5", idle=("ckpt --prompt words",)
            ),
            "--tokenizer": Option("the tokens of the text", "--tokenizer missing.json"),
            "--eos": Option("the token that ends a text", "--eos 999"),
            "--dtype": Option("the type of weights and activations", "--dtype f32", None, _GENERATION),
            "--kernels": Option("the kernels, to the last bits", "--kernels reference", None, _GENERATION),
            "--threads": Option("threads of a kernel", "--threads 3", None, _GENERATION),
            "--engine": Option("which processes keep keys and values", "--engine mpi", None, _HOLDERS),
            "--json": JSON,
        },
    ),
    "run": Command(
        "x.rtx --data book.txt --steps 2 --threads 1 --log l.jsonl",
        {
            "--data": Option("what it trains on", "--data other.txt"),
            "--text-key": Option(
                "the field of a JSONL line that is its text",
                "--text-key body",
                "x.rtx --steps 2 --log l.jsonl --data d.jsonl",
                idle=("x.rtx --data pairs.jsonl --train-on completion",),
            ),
            "--train-on": Option(
                "which tokens are in the loss",
                "--train-on completion",
                "x.rtx --steps 2 --log l.jsonl --data pairs.jsonl",
            ),
            "--prompt-key": Option("the field that is a prompt", "--prompt-key text", _PAIRS, idle=("x.rtx",)),
            "--completion-key": Option(
                "the field that is its completion", "--completion-key text", _PAIRS, idle=("x.rtx",)
            ),
            "--chat-key": Option(
                "the field that is a chat",
                "--chat-key talk",
                _CHATS,
                idle=("x.rtx --data pairs.jsonl --train-on completion",),
            ),
            "--chat-template": Option(
                "the template that makes a text of it", "--chat-template t.jinja", _CHATS, idle=("x.rtx",)
            ),
            "--pack": Option(
                "documents whole in sequences, or cut",
                "--pack whole",
                "x.rtx --steps 2 --log l.jsonl --data pairs.jsonl --text-key prompt",
                idle=("x.rtx --order documents",),
            ),
            "--eos": Option("the token at the end of documents", "--eos 7"),
            "--data-dtype": Option(
                "the type of a token file's elements",
                "--data-dtype uint32",
                "x.rtx --steps 2 --log l.jsonl --data t.bin",
            ),
            "--tokenizer": Option("the tokens of a text", "--tokenizer missing.json"),
            "--steps": Option("how long it trains", "--steps 3", "x.rtx --log l.jsonl"),
            "--lr": Option("the learning rate, in place of the plan's, as in the next ones", "--lr 0.01"),
            "--betas": Option("the memory of Adam's moments", "--betas 0.5 0.6"),
            "--eps": Option("the least divisor of an update", "--eps 0.01"),
            "--weight-decay": Option("how fast weights shrink", "--weight-decay 0.9"),
            "--warmup-steps": Option("steps until the learning rate is reached", "--warmup-steps 9"),
            "--total-steps": Option("when it has come down to `--min-lr`", "--total-steps 2"),
            "--min-lr": Option(
                "the learning rate from then on", "--min-lr 1e-4", "x.rtx --steps 3 --log l.jsonl --total-steps 2"
            ),
            "--decay": Option(
                "the curve along which it comes down", "--decay linear", "x.rtx --steps 3 --log l.jsonl --total-steps 3"
            ),
            "--decay-steps": Option(
                "the last steps, in which it does", "--decay-steps 1", "x.rtx --steps 3 --log l.jsonl --total-steps 3"
            ),
            "--max-norm": Option(
                "the largest norm; refused where the plan does not clip",
                "--max-norm 0.01",
                "clip.rtx --steps 2 --log l.jsonl",
            ),
            "--engine": Option(
                "all ranks in a process, or each in its own", "--engine mpi", "x.rtx --steps 2 --rank-order dp-first"
            ),
            "--rank-order": Option("which rank a process is, of many", "--rank-order dp-first", idle=("x.rtx",)),
            "--reduction": Option("the order of sums over processes", "--reduction fast", idle=("x.rtx",)),
            "--device": Option(
                "what executes it, and whose memory the arenas are in",
                "--device cuda",
                None,
                SETTINGS,
                ("x.rtx --engine mpi", "x.rtx --threads 2", "x.rtx --poison"),
            ),
            "--graph": Option(
                "a step of a device is recorded once, and repeated",
                "--graph",
                "x.rtx --steps 2 --device cuda",
                SETTINGS,
                (
                    "x.rtx",
                    "x.rtx --kernels torch-device",
                    "x.rtx --engine mpi",
                    "x.rtx --device cuda --interleave 3",
                    "x.rtx --device cuda --profile p.json",
                    "x.rtx --device cuda --check-memory",
                    "x.rtx --device cuda --threads 2",
                ),
            ),
            "--kernels": Option(
                "the kernels, to the last bits; auto chooses them", "--kernels reference", None, SETTINGS
            ),
            "--interleave": Option(
                "another legal order, with the same losses",
                "--interleave 3",
                None,
                SETTINGS,
                ("x.rtx --threads 2", "x.rtx --engine mpi"),
            ),
            "--threads": Option("engines side by side, and threads of a kernel", "--threads 2", "x.rtx", SETTINGS),
            "--check-memory": Option(
                "stops at an access outside of the plan's lives", "--check-memory", None, SETTINGS
            ),
            "--poison": Option("fills freed bytes with NaNs", "--poison", None, SETTINGS),
            "--init": Option("the weights it starts from", "--init w"),
            "--init-adapter": Option(
                "the adapters it starts from",
                "--init-adapter adapters",
                "lora.rtx --steps 1 --threads 1 --log l.jsonl --data book.txt --init w",
                idle=("x.rtx",),
            ),
            "--save": Option("a checkpoint", "--save saved"),
            "--save-every": Option(
                "a series of them", "--save-every 1", "x.rtx --steps 2 --log l.jsonl --save saved", idle=("x.rtx",)
            ),
            "--save-best": Option(
                "the state of the lowest held-out loss",
                "--save-best best",
                "x.rtx --steps 2 --eval-every 1",
                idle=("x.rtx", "x.rtx --save best --eval-every 1", "x.rtx --eval-every 1 --engine mpi"),
            ),
            "--keep-last": Option(
                "how many of these stay",
                "--keep-last 1",
                "x.rtx --steps 3 --save saved --save-every 1",
                idle=("x.rtx", "x.rtx --save saved"),
            ),
            "--resume": Option(
                "goes on from a checkpoint",
                "--resume ckpt",
                "x.rtx --steps 2 --threads 1 --log l.jsonl --data book.txt",
            ),
            "--new-data": Option(
                "goes on with other data than so far",
                "--new-data",
                "x.rtx --steps 2 --threads 1 --log l.jsonl --data other.txt --resume ckpt",
                idle=("x.rtx",),
            ),
            "--scratch": Option(
                "where the files are in which tensors are stored",
                "--scratch w",
                "filed.rtx --steps 1 --threads 1",
                idle=("x.rtx",),
            ),
            "--ram": Option("the most that a process may hold in memory", "--ram 20GiB", None, SETTINGS),
            "--run-dir": Option("where ranks say where they are", "--run-dir where"),
            "--hang-timeout": Option("how long no progress is borne", "--hang-timeout 3", None, SETTINGS),
            "--log": Option("a line a step", "--log m.jsonl"),
            "--log-to": Option(
                "the figures of the log in TensorBoard or Weights & Biases too",
                "--log-to wandb:tiny",
                reaches=_TRACKERS,
            ),
            "--eval-every": Option("evaluates held-out data", "--eval-every 1"),
            "--eval-data": Option(
                "which",
                "--eval-data other.txt",
                "x.rtx --data book.txt --steps 2 --log l.jsonl --eval-every 1",
                idle=("x.rtx",),
            ),
            "--eval-fraction": Option(
                "or what part of the data",
                "--eval-fraction 0.3",
                "x.rtx --data book.txt --steps 2 --log l.jsonl --eval-every 1",
                idle=("x.rtx", "x.rtx --eval-every 1 --eval-data other.txt"),
            ),
            "--eval-batches": Option(
                "how much of it",
                "--eval-batches 1",
                "x.rtx --data book.txt --eval-fraction 0.5 --steps 2 --log l.jsonl --eval-every 1",
                idle=("x.rtx",),
            ),
            "--patience": Option(
                "ends a run whose held-out loss does not fall",
                "--patience 1",
                "x.rtx --data book.txt --steps 6 --log l.jsonl --eval-every 1 --lr 0.9",
                idle=("x.rtx",),
            ),
            "--live": Option("a dashboard, on a terminal", "--live", None, SETTINGS),
            "--profile": Option("the wall time of every op", "--profile prof.json"),
            "--plot": Option("a picture of the losses", "--plot loss.svg"),
            "--seed": Option(
                "initial weights and the order of the data", "--seed 5", idle=("x.rtx --init w --order sequential",)
            ),
            "--order": Option("the order of the data", "--order sequential"),
            "--machine": Option(
                "what a .rtir is emitted for",
                "--machine slow.toml",
                "x.rtir --steps 1",
                "ratrain.ratrainc.compiling.proving:sound_program",
            ),
            "--json": JSON,
        },
        wall=True,
    ),
    "watch": Command(
        "log.jsonl",
        {
            "-o": Option("the page", "-o other.html"),
            "--once": Option("the page is written once, also while a run goes on", "--once", None, _WATCH),
            "--every": Option(
                "how often it is written while a run goes on", "--every 9", None, _WATCH, ("log.jsonl --once",)
            ),
            "--json": JSON,
        },
    ),
    "finetune": Command(
        "--model w --data chats.jsonl -o ft --chat-template chatml --seq-len 64 --steps 2",
        {
            "--model": Option("the model", "--model missing", "--data chats.jsonl -o ft --chat-template chatml"),
            "--data": Option("what it is trained on", "--data d.jsonl"),
            "-o": Option("the folder", "-o other", "--model w --data d.jsonl --seq-len 64 --steps 2"),
            "--lora": Option("the rank of adapters", "--lora 3", idle=(f"{_TUNE} --full",)),
            "--full": Option("the whole model trains", "--full", idle=(f"{_TUNE} --full --merge",)),
            "--alpha": Option("the scale of adapters", "--alpha 3", idle=(f"{_TUNE} --full",)),
            "--targets": Option("which layers get one", "--targets q_proj", idle=(f"{_TUNE} --full",)),
            "--base": Option("how frozen matrices are stored", "--base int8-block", idle=(f"{_TUNE} --full",)),
            "--dtype": Option("the type of weights and activations", "--dtype f16"),
            "--ram": Option("the memory that the plan is made for", "--ram 1MiB"),
            "--device": Option("what trains", "--device cuda:7"),
            "--seq-len": Option("tokens of a sequence", "--seq-len 32", _TUNE),
            "--batch": Option("sequences a step", "--batch 2"),
            "--epochs": Option("passes over the data", "--epochs 1", _TUNE, idle=(f"{_TUNE} --steps 1",)),
            "--steps": Option("steps, in their place", "--steps 3", _TUNE),
            "--lr": Option("the learning rate", "--lr 0.01"),
            "--schedule": Option("how it comes down", "--schedule linear"),
            "--decay-steps": Option(
                "in how many last steps", "--decay-steps 1", idle=(f"{_TUNE} --schedule constant",)
            ),
            "--warmup-steps": Option("steps until it is reached", "--warmup-steps 2"),
            "--eval-data": Option("held-out data", "--eval-data pairs.jsonl"),
            "--eval-fraction": Option(
                "or the part of the data",
                "--eval-fraction 0.4",
                "--model w --data d.jsonl -o ft --seq-len 64 --steps 2",
                idle=(f"{_TUNE} --eval-data pairs.jsonl",),
            ),
            "--eval-every": Option("how often it is evaluated", "--eval-every 1"),
            "--patience": Option(
                "ends a run whose held-out loss does not fall",
                "--patience 1",
                f"{_TUNE} --seq-len 64 --steps 9 --eval-every 1 --lr 3 --full",
            ),
            "--text-key": Option(
                "the field that is a text", "--text-key body", "--model w --data d.jsonl -o ft --seq-len 64 --steps 2"
            ),
            "--prompt-key": Option("the field that is a prompt", "--prompt-key text", _TUNE_PAIRS),
            "--completion-key": Option("the field that is its completion", "--completion-key text", _TUNE_PAIRS),
            "--chat-key": Option("the field that is a chat", "--chat-key talk"),
            "--chat-template": Option(
                "the template that makes a text of it",
                "--chat-template t.jinja",
                "--model w --data chats.jsonl -o ft --seq-len 64 --steps 2",
            ),
            "--tokenizer": Option("the tokens of a text", "--tokenizer missing.json"),
            "--seed": Option("new adapters and the order of the data", "--seed 5"),
            "--merge": Option("a model, in place of adapters", "--merge"),
            "--resume": Option("goes on with the folder's run", "--resume"),
            "--log-to": Option(
                "the figures of the log in TensorBoard or Weights & Biases too",
                "--log-to wandb:tiny",
                reaches=_TRACKERS,
            ),
            "--json": JSON,
        },
        wall=True,
    ),
    "launch": Command(
        "-n 4 --mpirun ./mpirun x.rtx",
        {
            "-n": Option(
                "processes, which are as many as the program has ranks without it", "-n 4", "--mpirun ./mpirun x.rtx"
            ),
            "--mpirun": Option(
                "the launcher", "--mpirun ./missing", "-n 4 x.rtx", "ratrain.ratrainc.running.supervisor:mpi_command"
            ),
            "--engine": Option(
                "mpirun and MPI, or torchrun and torch.distributed",
                "--engine torch",
                "-n 4 x.rtx",
                "ratrain.ratrainc.running.launching:start_command",
            ),
        },
    ),
    "postmortem": Command("where", {"--json": JSON}),
    "export-weights": Command(
        "ckpt -o out",
        {
            "-o": Option("the directory", "-o other", "ckpt"),
            "--max-shard-size": Option("how many files the weights are", "--max-shard-size 4KiB"),
            "--dtype": Option("the type of the weights", "--dtype bf16"),
            "--init": Option("the weights that adapters are merged into", "--init w", "tuned -o out"),
            "--adapter": Option("the adapters, and no model", "--adapter", "tuned -o out"),
            "--json": JSON,
        },
    ),
    "model": Command(
        "m.json",
        {"--seq-len": Option("arithmetic of a token, and what layers keep", "--seq-len 8"), "--json": JSON},
    ),
    "disasm": Command(
        "x.rtx",
        {
            "--stage": Option("one stage alone", "--stage 1", idle=("x.rtx --routines", "tiles.rtx --tiles")),
            "--engine": Option("one engine alone", "--engine send", idle=("x.rtx --routines", "tiles.rtx --tiles")),
            "--routines": Option("the routines in place of the streams", "--routines", idle=("tiles.rtx --tiles",)),
            "--tiles": Option("the tile schedules in place of the streams", "--tiles", "tiles.rtx"),
            "--core": Option(
                "the core that is followed", "--core 23", "tiles.rtx --tiles", idle=("x.rtx", "x.rtx --routines")
            ),
            "--limit": Option(
                "events of each schedule", "--limit 1", "tiles.rtx --tiles", idle=("x.rtx", "x.rtx --routines")
            ),
        },
    ),
    "doctor": Command(
        "",
        {
            "--model": Option("says what a run of it needs", "--model m.json", "--plan p.toml", idle=("",)),
            "--plan": Option("says what a run under it needs", "--plan p.toml", "--model m.json", idle=("", "x.rtx")),
            "--machine": Option(
                "what the program is emitted for", "--machine slow.toml", "x.rtir", "ratrain.api:load", ("",)
            ),
            "--json": JSON,
        },
        wall=True,
    ),
    "precompile": Command(
        "",
        {
            "--dtype": Option(
                "the types that loops are compiled for",
                "--dtype f32",
                None,
                "ratrain.ratrainc.running.precompiling:precompile",
            ),
            "--json": JSON,
        },
        wall=True,
    ),
    "alloc": Command(
        "b.csv --capacity 1000",
        {
            "--capacity": Option("the bytes there are", "--capacity 10", "b.csv"),
            "-o": Option("the addresses that are written", "-o b2.csv"),
            "--seconds": Option(
                "time for the search", "--seconds 1", None, "ratrain.ratrainc.memory.buffer_placing:allocate"
            ),
            "--json": JSON,
        },
        wall=True,
    ),
    "machines": Command("cpu", {"--json": JSON}),
    "strategies": Command("", {"--json": JSON}),
    "passes": Command("", {"--json": JSON}),
    "completion": Command("bash"),
}
