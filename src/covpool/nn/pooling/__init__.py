"""The pooling methods, a file each, and the one table that names them.

To add one: write a subclass of :class:`~covpool.nn.pooling.method.Method` in a file here and add its
line to ``METHODS``.
"""

from covpool.nn.pooling.bcnn import Bcnn
from covpool.nn.pooling.cholesky import Cholesky
from covpool.nn.pooling.cov import Cov
from covpool.nn.pooling.deep_o2p import DeepO2P
from covpool.nn.pooling.g2denet import G2DeNet
from covpool.nn.pooling.gap import Gap
from covpool.nn.pooling.improved_bcnn import ImprovedBcnn
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.method import Method
from covpool.nn.pooling.mpa_lya import MpaLya
from covpool.nn.pooling.mpn_cov import MpnCov
from covpool.nn.pooling.mtp_lya import MtpLya
from covpool.nn.pooling.polar_express import PolarExpress
from covpool.nn.pooling.power_tmlr import PowerTmlr
from covpool.nn.pooling.svd_pade import SvdPade
from covpool.nn.pooling.svd_taylor import SvdTaylor

METHODS: dict[str, type[Method]] = {
    "gap": Gap,
    "cov": Cov,
    "isqrt_cov": IsqrtCov,
    "mpn_cov": MpnCov,
    "bcnn": Bcnn,
    "improved_bcnn": ImprovedBcnn,
    "deep_o2p": DeepO2P,
    "g2denet": G2DeNet,
    "mpa_lya": MpaLya,
    "mtp_lya": MtpLya,
    "svd_pade": SvdPade,
    "svd_taylor": SvdTaylor,
    "polar_express": PolarExpress,
    "power_tmlr": PowerTmlr,
    "cholesky": Cholesky,
}

__all__ = ["METHODS", "Method"]
