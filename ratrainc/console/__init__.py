"""The terminal: colours, progress, tables, signals."""
