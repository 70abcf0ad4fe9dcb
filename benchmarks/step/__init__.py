"""The cost and the exactness of optimizer steps.

Scripts: `time_optimizers` (how long a step takes, also before and after a change), `same_bits`
(whether two versions agree bit for bit), `preconditioner_cost` and `lab_throughput` (whole training
steps), `state_rounding` (bfloat16 state), `tune_blocks` (block sizes of the CUDA kernel),
`scale_table` (what P costs on many processes, by formula). Helpers: `shapes`, `candidates`,
`timed_optimizer`, `versions`.
"""
