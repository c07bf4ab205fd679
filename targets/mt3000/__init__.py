"""The MT-3000 target: machine files, costs and the emitter."""
