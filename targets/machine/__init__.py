"""Machines described in a file: constants, links, and costs of ops and messages on them."""
