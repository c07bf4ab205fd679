"""Tables of published measurements, and how far off the simulator is on them."""
