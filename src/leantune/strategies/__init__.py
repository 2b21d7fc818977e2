"""Where the weights live and how gradients meet: one file a strategy, found by its name."""
