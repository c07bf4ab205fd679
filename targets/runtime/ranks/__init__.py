"""One process per rank: the engine, its collectives, and everything else that does not depend on the library used.

Libraries implement the protocol in `communicator.py`: `targets/runtime/mpi` and `targets/pytorch/ranks` do.
"""
