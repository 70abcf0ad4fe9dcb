"""The arithmetic of P that has kernels of its own on NVIDIA GPUs, through Triton.

symmetric_product  decides where only half of a product is computed; `symmetric_kernel` does it
elementwise        momentum, the diagonal P and copies in one pass each, by `elementwise_kernels`
launch             launches a kernel with little work for the host

Only the modules of kernels import Triton when they are imported.
"""
