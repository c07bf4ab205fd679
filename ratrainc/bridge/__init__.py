"""Conversion between plans and settings of other frameworks, for `import-plan` and `export`."""
