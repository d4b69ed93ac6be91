"""Compute the dense half of the model and its optimizers, without parallelism."""
