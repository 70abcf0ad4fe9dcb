"""Algorithms that learn the spectrum of a matrix from its products with vectors.

`lanczos` finds the ends of the spectrum, each with an error bound; `density` estimates how the
eigenvalues are distributed. Both run the recurrence in `krylov`, whose vectors are kept in `basis`;
`bounds` turns residuals into errors.
"""
