"""Training data: token files, text, documents, tokenizers."""
