"""The planner: which plan to run on so many clusters, and how far it can be from the best possible.

`profile` reads times and bytes of the units of a model, `bounds` makes lower bounds of them for whole arrays of plans, `cuts` searches the
stage cuts, `evaluation` compiles and simulates one plan, `search` joins both levels into an answer with a certificate.
"""
