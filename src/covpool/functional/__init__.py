"""The mathematics, on tensors. Imports torch and nothing else."""

from covpool.functional.covariance import covariance, second_moment, triu_unvec, triu_vec
from covpool.functional.eigen import matrix_log, matrix_power
from covpool.functional.isqrt_cov import isqrt_cov
from covpool.functional.matrix_sqrt import RootReport, inverse_matrix_sqrt, matrix_sqrt, root_report
from covpool.functional.merge import Moments, StreamingCovariance, covariance_merge, moments
from covpool.functional.polar_express import polar_express_sqrt

__all__ = [
    "Moments",
    "RootReport",
    "StreamingCovariance",
    "covariance",
    "covariance_merge",
    "inverse_matrix_sqrt",
    "isqrt_cov",
    "matrix_log",
    "matrix_power",
    "matrix_sqrt",
    "moments",
    "polar_express_sqrt",
    "root_report",
    "second_moment",
    "triu_unvec",
    "triu_vec",
]
