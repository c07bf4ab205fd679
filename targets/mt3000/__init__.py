"""The MT-3000 target: machine files, routines, costs and the emitter."""
