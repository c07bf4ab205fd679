"""What is written to a terminal: all text of commands goes through here, and nothing in it can steer a terminal."""

from __future__ import annotations

import sys

import click

from ratrain_ir.diagnostics import printable


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Write a text to stdout or stderr, made printable: names and contents of files may hold anything."""
    click.echo(printable(text), err=err, nl=nl)


def echo_document(text: str) -> None:
    """Write a file's content to stdout: printable on a terminal, and as it is for whoever reads it from a pipe or file."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
