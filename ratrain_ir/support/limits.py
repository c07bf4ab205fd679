"""Largest counts of a plan or a run: far above any run, so that they catch typing errors before memory is filled."""

MAX_DEVICES = 1 << 20
MAX_PARALLEL = 1 << 16
"""ranks of one kind: data-parallel, tensor-parallel, pipeline"""
MAX_CHUNKS = 1 << 8
"""chunks of layers a pipeline rank"""
MAX_MICRO_BATCH = 1 << 16
"""sequences"""
MAX_MICRO_BATCHES = 1 << 20
"""micro-batches of a replica in a step"""
MAX_SEQ_LEN = 1 << 20
"""tokens"""
MAX_LAYERS = 1 << 14
MAX_HIDDEN = 1 << 20
"""elements"""
MAX_STEPS = 1 << 40
MAX_SEED = (1 << 63) - 1
