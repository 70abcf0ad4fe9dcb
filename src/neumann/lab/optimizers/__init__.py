"""The optimizers of the lab.

arm_recipes        all of them by name, with their usual learning rates
arms               an optimizer with options, as a comparison names it
role_arms          the options of `neumann-spectral` about roles
role_rates         a learning rate for each role, for other optimizers
matrix_arms        optimizers for hidden matrices, with AdamW for the rest: Muon, NorMuon, SOAP
joined_optimizer   several optimizers that are used as one
newton_cg          the arm `cg`: Newton's method with conjugate gradients
"""
