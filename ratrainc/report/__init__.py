"""The schedule as one self-contained page: timeline, address map, live bytes, and the tables beside them."""
