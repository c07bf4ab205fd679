"""What `ratrain.api` is made of: the work of commands as typed functions, which the commands call too."""
