"""The paper's tables and figures: a file each, and the list of them in the paper's order."""

from covpool.reproduce.experiments import (
    approximation,
    figure2,
    figure4,
    table2,
    table3,
    table4,
    table5,
    table6,
    table7,
)
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.experiments.measurement import Measurement

EXPERIMENTS: dict[str, Experiment | Measurement] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (figure2, table2, table3, table4, figure4, table5, table6, approximation, table7)
}
TRAINED = [one for one in EXPERIMENTS.values() if isinstance(one, Experiment)]
