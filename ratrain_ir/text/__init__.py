"""The `.rtir` text: parser, printer, and the fast reader of large files."""
