"""Tools for authors of passes and targets: generated models, plans, modules, and their invariants (extra `testing`)."""
