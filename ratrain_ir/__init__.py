"""The intermediate representation: model and plan in, modules, their text, their analyses and their verifier."""
