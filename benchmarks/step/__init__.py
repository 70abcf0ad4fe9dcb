"""The cost and the exactness of optimizer steps.

Scripts:

time_optimizers         how long a step takes, also before and after a change
compare_muons           a step of the spectral form beside Muon and SOAP of torch, heavyball and
                        pytorch_optimizer, on whole networks
time_symmetric_product  the kernel of XXᵀ beside torch.bmm
same_bits               whether two versions agree bit for bit
preconditioner_host     what the host does for the spectral P
preconditioner_cost     what P adds to a training step
preconditioner_share    which share of a GPT's training step P takes
lab_throughput          training steps of the lab
ghost_batchnorm         BatchNorm over groups of 32 examples, beside plain BatchNorm
state_rounding          bfloat16 state: what rounding does to it
state_memory            how much memory the state takes
tune_blocks             block sizes of the CUDA kernel
scale_table             operations and bytes of distributed P, computed
update_cost_page        the tables of docs/cost.md, from these measurements

Helpers: `shapes`, `networks`, `candidates`, `peers`, `timed_optimizer`, `timed_peer`, `versions`,
`step_tables`.
"""
