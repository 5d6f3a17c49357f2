"""One strategy a module: a function that moves a draft towards its target, and nothing else."""
