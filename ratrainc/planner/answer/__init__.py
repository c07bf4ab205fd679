"""Answers as commands show and write them."""
