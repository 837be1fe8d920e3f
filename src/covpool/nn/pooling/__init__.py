"""The pooling methods, a file each, and the one table that names them.

To add one: write a subclass of :class:`~covpool.nn.pooling.method.Method` in a file here and add its
line to ``METHODS``.
"""

from covpool.nn.pooling.bcnn import Bcnn
from covpool.nn.pooling.cov import Cov
from covpool.nn.pooling.gap import Gap
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.method import Method
from covpool.nn.pooling.mpn_cov import MpnCov

METHODS: dict[str, type[Method]] = {
    "gap": Gap,
    "cov": Cov,
    "isqrt_cov": IsqrtCov,
    "mpn_cov": MpnCov,
    "bcnn": Bcnn,
}

__all__ = ["METHODS", "Method"]
