"""The paper's experiments in miniature: the networks that each table and figure trains."""

from __future__ import annotations

from dataclasses import dataclass, replace

from covpool.nn.pooling import METHODS
from lab.reproduce.networks import RESNETS, Configuration


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        label: label in the table.
        configuration: configuration with the first seed.
        seeds: maximum number of seeds; ``None`` (no maximum) if the row tests a claim of the paper.
    """

    label: str
    configuration: Configuration
    seeds: int | None = None


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper.

    Attributes:
        name: name on the command line and in file names.
        title: title of the table.
        paper: the paper's result, in a sentence.
        rows: the runs to train.
        reference: row that the times of others are divided by; ``None`` if nothing is timed.
        observed: rows whose pooling is observed epoch by epoch.
    """

    name: str
    title: str
    paper: str
    rows: tuple[Row, ...]
    reference: str | None = None
    observed: tuple[str, ...] = ()

    def configurations(self, seeds: int) -> list[tuple[str, Configuration]]:
        """Return labels and configurations for up to ``seeds`` seeds; a seed is complete before the next."""
        return [
            (row.label, replace(row.configuration, seed=seed))
            for seed in range(seeds)
            for row in self.rows
            if row.seeds is None or seed < row.seeds
        ]


STEPS = range(1, 10)
PLAIN, EXACT = "Plain-COV", "MPN-COV (EIG)"
FITTED = "3 fitted steps"


def isqrt_cov(steps: int) -> Configuration:
    """Return AlexNet with a number of Newton-Schulz steps; the other experiments use five."""
    return Configuration("alexnet", "isqrt_cov", {"steps": steps})


FIGURE2 = Experiment(
    name="figure2",
    title="Figure 2: error against the number N of Newton-Schulz steps, AlexNet",
    paper="the error falls from N=1 to N=5 steps, is lowest between 5 and 7, and rises after 7",
    rows=(
        Row(PLAIN, Configuration("alexnet", "cov")),
        *(Row(f"N={steps}", isqrt_cov(steps)) for steps in STEPS),
        Row(FITTED, Configuration("alexnet", "isqrt_cov", {"iteration": "fitted", "steps": 3})),
        Row(EXACT, Configuration("alexnet", "mpn_cov")),
    ),
)


TRACE, FROBENIUS = "isqrt_cov (trace)", "isqrt_cov (Frobenius)"
# Methods that the paper makes claims about.
IN_THE_PAPER = ("gap", "cov", "mpn_cov", "bcnn", "deep_o2p", "improved_bcnn", "g2denet")
# Methods whose vectors have another scale get their own learning rates; the table has the usual rate too.
# At the usual rate, unit-length vectors hardly change the classifier, and the large values of logarithms
# change it too much. Improved B-CNN also needs an elementwise root that is less steep near zero.
OWN = {
    "bcnn": Configuration("alexnet", "bcnn", classifier=100.0),
    "cbp": Configuration("alexnet", "cbp", classifier=100.0),
    "deep_o2p": Configuration("alexnet", "deep_o2p", lr=0.1),
    "improved_bcnn": Configuration("alexnet", "improved_bcnn", {"eps": 0.01}, classifier=100.0),
}
TABLE3 = Experiment(
    name="table3",
    title="Table 3: all methods on AlexNet",
    paper=(
        "top-1 errors on ImageNet, in percent, are 38.45 for iSQRT-COV with the covariance divided by its "
        "trace, 38.78 with its Frobenius norm, 38.51 for MPN-COV, 38.71 for G2DeNet, 39.89 for B-CNN, "
        "40.75 for improved B-CNN, 41.8 for AlexNet itself and 42.16 for DeepO2P"
    ),
    rows=(
        Row(TRACE, isqrt_cov(5)),
        Row(FROBENIUS, Configuration("alexnet", "isqrt_cov", {"steps": 5, "normalization": "frobenius"})),
        Row(
            "isqrt_cov (trace), float32",
            Configuration("alexnet", "isqrt_cov", {"steps": 5}, precision="float32"),
            seeds=1,
        ),
        *(
            Row(
                name,
                OWN.get(name, Configuration("alexnet", name)),
                seeds=None if name in IN_THE_PAPER else 1,
            )
            for name, method in METHODS.items()
            if name != "isqrt_cov" and (name == "gap" or method.order == 2)
        ),
        *(Row(f"{name} (usual settings)", Configuration("alexnet", name), seeds=1) for name in OWN),
    ),
    reference=TRACE,
)


OBSERVED_STEPS = (3, 5, 7)
OBSERVED = (*(f"N={steps}" for steps in OBSERVED_STEPS), EXACT)
APPROXIMATION = Experiment(
    name="approximation",
    title="Why approximate roots perform better: eigenvalues while AlexNet learns",
    paper="the authors conjecture that the approximate root is a more robust estimate of the covariance",
    rows=(
        *(Row(f"N={steps}", isqrt_cov(steps), seeds=1) for steps in OBSERVED_STEPS),
        Row(EXACT, Configuration("alexnet", "mpn_cov"), seeds=1),
    ),
    observed=OBSERVED,
)


NONE, BATCHNORM, MATCHED = "none", "BatchNorm", "trace (matched)"
# Further factors on the learning rate for training without compensation.
TUNED = (10.0, 100.0, 1000.0)


def _without(lr: float = 1.0) -> Configuration:
    return Configuration("resnet10", "isqrt_cov", {"compensation": "none"}, lr=lr)


TABLE4 = Experiment(
    name="table4",
    title="Table 4: post-compensation, ResNet",
    paper=(
        "post-compensation multiplies the result of the iteration by the square root of the trace, by "
        "which the covariance was divided before. The top-1 error is 22.14 % with post-compensation, and "
        "23.12 % with BatchNorm instead. With neither, training fails"
    ),
    rows=(
        Row(NONE, _without()),
        *(Row(f"none, rate ×{lr:g}", _without(lr)) for lr in TUNED),
        Row(BATCHNORM, Configuration("resnet10", "isqrt_cov", {"compensation": "batchnorm"})),
        Row(MATCHED, Configuration("resnet10", "isqrt_cov")),
    ),
    observed=(NONE, BATCHNORM, MATCHED),
)


FIRST, MPN_COV, OURS = "ResNet", "MPN-COV", "iSQRT-COV"
FIGURE4 = Experiment(
    name="figure4",
    title="Figure 4: convergence, ResNet",
    paper=(
        "iSQRT-COV and MPN-COV converge much faster than the ResNet. The top-1 error is 22.14 % after 60 "
        "epochs, and hardly lower after 90"
    ),
    rows=(
        Row(FIRST, Configuration("resnet10", "gap")),
        Row(MPN_COV, Configuration("resnet10", "mpn_cov")),
        Row(OURS, Configuration("resnet10", "isqrt_cov")),
    ),
)
TABLE5 = Experiment(
    name="table5",
    title="Table 5: second order against first order, ResNets of three depths",
    paper=(
        "the top-1 error of second order is 22.14 % with 50 layers and 21.21 % with 101. "
        "The error of first order is 24.7 % with 50, 23.6 % with 101 and 23.0 % with 152"
    ),
    rows=tuple(
        Row(f"{network}, {pool}", Configuration(network, pool))
        for network in RESNETS
        for pool in ("gap", "isqrt_cov")
    ),
)
DIMS = (32, 64, 128)
TABLE6 = Experiment(
    name="table6",
    title="Table 6: a compact covariance, ResNet",
    paper="the top-1 error is 24.7 % for the ResNet, and 23.73, 22.78 and 22.14 % for d = 64, 128 and 256",
    rows=(
        Row(FIRST, Configuration("resnet10", "gap")),
        Row("d=32", Configuration("resnet10", "isqrt_cov", dim=32)),
        Row("d=64", Configuration("resnet10", "isqrt_cov")),
        Row("d=128", Configuration("resnet10", "isqrt_cov", dim=128)),
    ),
    reference=FIRST,
)
EXPERIMENTS = {each.name: each for each in (FIGURE2, TABLE3, TABLE4, FIGURE4, TABLE5, TABLE6, APPROXIMATION)}
