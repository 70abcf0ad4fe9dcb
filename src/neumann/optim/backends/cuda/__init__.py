"""The update on NVIDIA GPUs as one pass over memory, through Triton.

`stepper` is the backend and launches a step, `layout` and `device_tables` describe the tensors to
the device, `scalars_kernel` works out phase and coefficients there, and `update_kernel` is the
arithmetic. Importing this needs torch alone.
"""

from neumann.optim.backends.cuda.stepper import TritonBackend

__all__ = ["TritonBackend"]
