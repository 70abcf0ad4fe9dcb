"""What single choices inside the optimizers are worth.

Scripts: `spectral_variants` (changes to the spectral form), `muon_fallback` (the learning rate of
Muon's AdamW), `embeddings` (embeddings as matrices or elementwise), `other_data` (the contest's
settings on CIFAR-100), `decay_by_epochs` (weight decay by how often data are repeated). Helpers:
`variant_preconditioners` holds the preconditioners that `spectral_variants` tries,
`other_data_table` the choices of `other_data` and its table.
"""
