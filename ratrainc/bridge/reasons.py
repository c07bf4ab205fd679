"""Reasons that readers of several frameworks give for settings which they do not carry over."""

from __future__ import annotations

# of plans: why a setting is no key of them

MODEL = "of the model: its config.json says it (--model)"
FILES = "of checkpoints and logs: 'run' is given places for them"
VALIDATION = "'run' is given the validation data, and how often it is looked at"
PROCESS = "how this process is run changes no plan"
KERNELS = "kernels are chosen by 'run --kernels'"
OVERLAP = "the passes decide which communication overlaps with compute: nothing to switch on"
KEYS_TRAVEL = "context ranks gather keys and values: which way they travel changes no plan"
RECOMPUTE = "'recompute{policy=auto}' chooses what to recompute"
HOMES = "state has the homes that the compiler gives it"
UPDATES = "updates have the places that the compiler gives them"
SCALER = "a dynamic loss scale starts and adapts by rules of ratrain"
FLOAT8 = "float8 is no type of a plan"
EXPERTS = "of experts, whose settings are not read"
ONE_EXPERT = "arguments of experts are not read, so another model would be trained"

# of jobs: why a setting changes no byte of a device

OF_TRAINING = "of training, which memory does not depend on"
OF_RATE = "of the learning rate: no byte of a device"
"""Reasons of settings that change no byte of a device, and what is trained; other readers of a job look for them."""
OF_FILES = "of files and logs: no byte of a device"
OF_LOGS = "of logs and measurements: no byte of a device"
OF_PROCESS = "how the process is run changes no byte of a device"
OF_VALIDATION = "validation keeps no gradient, and is counted as smaller than a step of training"
OF_VALUES = "changes values, and no size"
OF_OVERLAP = "communication overlaps with compute, or it does not"
OF_ORDER = "of loading, saving and the order of communication"
