"""The cost and the exactness of optimizer steps.

Scripts:

time_optimizers      how long a step takes, also before and after a change
same_bits            whether two versions agree bit for bit
preconditioner_host  what the host does for the spectral P
preconditioner_cost  what P adds to a training step
lab_throughput       training steps of the lab
state_rounding       bfloat16 state
tune_blocks          block sizes of the CUDA kernel
scale_table          operations and bytes of distributed P, computed

Helpers: `shapes`, `candidates`, `timed_optimizer`, `versions`.
"""
