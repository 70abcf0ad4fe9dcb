"""The arithmetic of P that has kernels of its own on NVIDIA GPUs, through Triton.

symmetric_product    decides where only half of a product is computed; its kernel is `symmetric_kernel`
elementwise          momentum and the diagonal P in one pass; its kernels are `elementwise_kernels`
launch               launches a kernel with little work for the host

Only the modules of kernels import Triton when they are imported.
"""
