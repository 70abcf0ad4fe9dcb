"""The one update as one pass over memory: `cuda` for NVIDIA GPUs (Triton), `cpu` for CPUs (numba).

Both read w, g, m and δ once, write w, m and δ once, and sum δ² for the next step on the way, in
every phase, dtype and layout that `update` takes. What they are compiled with is optional: each
module says in `unavailable()` what is missing, and importing it needs nothing but torch.
"""
