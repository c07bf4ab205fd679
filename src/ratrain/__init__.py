"""RATrain: a compiler for LLM training schedules on machines whose memory is small, explicit and slow to reach.

A folder `X` of the checkout is the package `ratrain.X` (`ratrain.passes`, `ratrain.targets.runtime`): one installed
name holds them all, so that a user's own `passes.py` or `targets/` is never taken for ours. `ratrain.api` is the Python
API.
"""
