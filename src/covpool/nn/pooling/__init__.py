"""The pooling methods and the table of their names.

To add a method, write a subclass of :class:`~covpool.nn.pooling.method.Method` and add a line to ``METHODS``.
A method outside of covpool is registered by :func:`register_method` or by an entry point.
"""

from __future__ import annotations

from covpool.nn.pooling.abmilp import Abmilp
from covpool.nn.pooling.attentive import Attentive
from covpool.nn.pooling.bcnn import Bcnn, ImprovedBcnn
from covpool.nn.pooling.cbp import Cbp
from covpool.nn.pooling.cholesky import Cholesky
from covpool.nn.pooling.correlation import Correlation
from covpool.nn.pooling.dropcov import DropCov
from covpool.nn.pooling.efficient_probing import EfficientProbing
from covpool.nn.pooling.g2denet import G2DeNet
from covpool.nn.pooling.gem import Gem
from covpool.nn.pooling.isice import Isice
from covpool.nn.pooling.isqrt_cov import IsqrtCov, PolarExpress
from covpool.nn.pooling.lyapunov import MpaLya, MtpLya
from covpool.nn.pooling.method import (
    DEFAULT_METHOD,
    METHODS,
    Cov,
    Gap,
    Method,
    check_method,
    is_method,
    module_of,
    register_method,
)
from covpool.nn.pooling.moment_probing import MomentProbing
from covpool.nn.pooling.simpool import Simpool
from covpool.nn.pooling.spectral import DeepO2P, MpnCov, PowerTmlr
from covpool.nn.pooling.svd import SvdPade, SvdTaylor

METHODS |= {
    "gap": Gap,
    "cov": Cov,
    "isqrt_cov": IsqrtCov,
    "mpn_cov": MpnCov,
    "bcnn": Bcnn,
    "improved_bcnn": ImprovedBcnn,
    "deep_o2p": DeepO2P,
    "g2denet": G2DeNet,
    "cbp": Cbp,
    "mpa_lya": MpaLya,
    "mtp_lya": MtpLya,
    "svd_pade": SvdPade,
    "svd_taylor": SvdTaylor,
    "polar_express": PolarExpress,
    "dropcov": DropCov,
    "moment_probing": MomentProbing,
    "power_tmlr": PowerTmlr,
    "cholesky": Cholesky,
    "correlation": Correlation,
    "isice": Isice,
    "gem": Gem,
    "abmilp": Abmilp,
    "simpool": Simpool,
    "attentive": Attentive,
    "efficient_probing": EfficientProbing,
}

__all__ = ["DEFAULT_METHOD", "METHODS", "Method", "check_method", "is_method", "module_of", "register_method"]
