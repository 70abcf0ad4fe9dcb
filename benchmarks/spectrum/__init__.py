"""Curvature measurements.

Scripts: `compare_tools` (cost and accuracy beside other tools, which the helper `hessian_tools`
wraps), `dense_hessian` (against all eigenvalues of small networks), `along_training` (the paper's
figure), `at_initialization` (the negative eigenvalues of a new network), `preconditioned_hessian`
(the Hessian that the preconditioned series sees). The helper `short_training` holds what they
train.
"""
