"""Machines described in a file: constants, links, and what ops and messages cost on them."""
