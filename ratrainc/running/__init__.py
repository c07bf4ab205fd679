"""Training runs and text generation: launch, supervise, display, log and report."""
