"""The arithmetic of P that has a kernel of its own on NVIDIA GPUs, through Triton.

`symmetric_product` decides where the kernel runs and launches it; `symmetric_kernel` is the
arithmetic and the only module that imports Triton.
"""
