"""The pooling methods, a file each, and the one table that names them.

To add one: write a subclass of :class:`~covpool.nn.pooling.method.Method` in a file here and add its
line to ``METHODS``.
"""

from covpool.nn.pooling.gap import Gap
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.method import Method

METHODS: dict[str, type[Method]] = {
    "gap": Gap,
    "isqrt_cov": IsqrtCov,
}

__all__ = ["METHODS", "Method"]
