"""Callbacks for training frameworks: `lightning`, and `transformers` for the HF Trainer.

Each module needs its own package, and a missing one is an error that names the extra to install.
Accelerate needs no callback.
"""
