"""Symmetric matrices that are known only by their products with vectors.

`symmetric` defines the interface, and `preconditioned` wraps a matrix. `loss_curvature` is what
`hessian`, `gauss_newton` and `finite_differences` share. Its parts are `objective` (the loss as a
function of the weights), `batches`, `model_state`, `vectors`, `autograd` (the derivatives) and
`float32_error` (how far rounding may have moved a product).
"""
