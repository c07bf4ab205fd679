"""Answer whether a training run fits its devices, from the settings file of the framework that would run it (`fit`)."""
