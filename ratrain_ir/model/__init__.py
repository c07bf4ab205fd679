"""Parameters, blocks and saved tensors of a model, whole and on one tensor-parallel rank."""
