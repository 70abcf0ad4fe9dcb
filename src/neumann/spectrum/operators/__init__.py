"""Symmetric matrices that are known only by their products with vectors.

`symmetric` defines the interface. `loss_curvature` is what the Hessian, the Gauss–Newton matrix and
finite differences share; `batches`, `objective`, `model_state` and `vectors` are its parts.
"""
