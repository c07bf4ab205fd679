"""The planner: the plan to run on a number of clusters, and its distance from the best possible.

`space` has the plans to consider, `bounds` profiles of a model and lower bounds for whole arrays of plans, `search`
both levels of the search with their answer and its certificate, `answer` the tables and files that commands show and
write.
"""
