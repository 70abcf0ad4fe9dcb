"""What single choices inside the optimizers are worth.

Scripts: `spectral_variants` (changes to the spectral form), `muon_fallback` (the learning rate of
Muon's AdamW), `embeddings` (embeddings as matrices or elementwise), `other_data` (the contest's
settings on CIFAR-100), `decay_by_epochs` (weight decay by how often data are repeated). The helper
`variant_preconditioners` holds the preconditioners that `spectral_variants` tries.
"""
