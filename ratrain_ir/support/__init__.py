"""Files, diagnostics, plugins, compiled loops: what every room uses and nothing of schedules."""
