"""The mathematics behind the optimizer, for small problems and for teaching.

Newton's method solves A·z = −∇f, with A the Hessian. The Neumann series A⁻¹ = Σ (I − A)ⁱ needs only
products with A: `series` sums it for any linear system, `idealized` is Algorithm 1 (one sum per
mini-batch, from gradients), and Algorithm 2, :class:`neumann.Neumann`, spreads the sum over the
training steps. `conjugate_gradients` solves the same systems with a Krylov method, to compare with.
"""
