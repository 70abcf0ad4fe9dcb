"""Training frameworks: `lightning`, `accelerate`, and `transformers` for the HF Trainer.

Each module has a `large_batch` that sets up roles and schedule for its framework. `lightning` and
`transformers` also have a callback that evaluates and saves the right weights, and if the package
is missing, an error names the extra to install. Accelerate needs no callback.
"""
