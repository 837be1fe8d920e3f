"""The mathematics, on tensors. Imports torch and nothing else."""

from covpool.functional.covariance import covariance
from covpool.functional.isqrt_cov import isqrt_cov
from covpool.functional.matrix_sqrt import inverse_matrix_sqrt, matrix_sqrt
from covpool.functional.triu import triu_unvec, triu_vec

__all__ = [
    "covariance",
    "inverse_matrix_sqrt",
    "isqrt_cov",
    "matrix_sqrt",
    "triu_unvec",
    "triu_vec",
]
