"""Models without a file: their hyperparameters as published, and the header that a GGUF file of them would have."""
