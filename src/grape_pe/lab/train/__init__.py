"""Training: the loop, its checkpoints and files, one process or many."""
