"""For authors of passes and targets: generated models, plans and modules, and what must hold of them (extra `testing`)."""
