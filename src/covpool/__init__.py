"""Global covariance pooling with a fast matrix square root (iSQRT-COV), for any image backbone.

Importing covpool imports torch and nothing else: what needs more is a subpackage of its own.
"""

from covpool import functional, nn

__version__ = "0.1.0"

__all__ = ["__version__", "functional", "nn"]
