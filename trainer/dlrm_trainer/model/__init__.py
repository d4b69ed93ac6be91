"""The dense half of the model, its products and its optimizers: no parallelism."""
