"""Training on torch.distributed: recipes, the loop, checkpoints, and the folder that a run leaves."""
