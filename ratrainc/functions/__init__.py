"""The functions of `ratrain.api`: the work of each command as a typed function, which the command calls too."""
