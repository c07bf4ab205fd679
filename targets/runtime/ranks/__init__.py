"""One process a rank: the engine, its collectives as phases of requests, and what else does not depend on the library that moves the bytes.

What it asks of one stands in `communicator.py`; `targets/runtime/mpi` and `targets/pytorch` answer.
"""
